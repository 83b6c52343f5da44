"""Hugging Face config.json -> the facts of a model that actor, weights and conversion need, whatever its family."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_arpo.config.actor import LayoutSettings, RecomputeSettings

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts that every layer has in place of a dense MLP."""

    num_experts: int
    num_active: int
    """Experts a token goes to."""
    ffn_hidden_size: int
    normalize_weights: bool
    """The weights of the chosen experts sum to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Example: Architecture(family="qwen3", num_layers=4, hidden_size=128, ffn_hidden_size=640, num_heads=4, num_kv_heads=2,
    head_dim=32, vocab_size=400, tied_embeddings=True, norm_eps=1e-6, rope_theta=1e6, max_positions=4096, qkv_bias=False,
    qk_norm=True)"""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    norm_eps: float
    rope_theta: float
    max_positions: int
    qkv_bias: bool
    qk_norm: bool
    experts: Experts | None = None
    rope_scaling: RopeScaling | None = None

    def padded_vocab_size(self, tp: int) -> int:
        """Vocabulary rounded up to a multiple of 128 on each of `tp` ranks; the extra rows never get probability.

        128 keeps the shared embedding's gradient bucket free of padding, which megatron-core 0.16.1 loses track of when it
        reads a `fully_reshardable` optimizer checkpoint on the last of several pipeline stages.
        """
        multiple = 128 * tp
        return -(-self.vocab_size // multiple) * multiple

    def check_layout(self, layout: LayoutSettings) -> None:
        """Raises ValueError, naming the rule, where the layout cannot split this model."""
        tp = layout.tp
        for name, size in (("num_attention_heads", self.num_heads), ("num_key_value_heads", self.num_kv_heads)):
            if size % tp:
                fitting = [n for n in range(1, size + 1) if self.num_heads % n == 0 and self.num_kv_heads % n == 0]
                raise ValueError(f"actor.layout.tp={tp} must divide {name}={size}; use {_one_of(fitting)}")
        if self.experts is None and self.ffn_hidden_size % tp:
            raise ValueError(f"actor.layout.tp={tp} must divide intermediate_size={self.ffn_hidden_size}; use a smaller tp")
        chunks = layout.pp * layout.vpp
        if self.num_layers % chunks:
            what = f"pp={layout.pp}" if layout.vpp == 1 else f"pp={layout.pp} times vpp={layout.vpp}"
            raise ValueError(
                f"actor.layout.{what} must divide num_hidden_layers={self.num_layers}; {chunks} does not, "
                f"use {_one_of([n for n in range(1, self.num_layers + 1) if self.num_layers % n == 0])}"
            )
        self._check_experts(layout)

    def check_recompute(self, recompute: RecomputeSettings | None, layout: LayoutSettings) -> None:
        """Raises ValueError where recomputation names what this model's layers have not, or more layers than a chunk has."""
        if recompute is None:
            return
        if recompute.granularity == "full":
            in_chunk = self.num_layers // (layout.pp * layout.vpp)
            if in_chunk % recompute.layers:
                fitting = _one_of([n for n in range(1, in_chunk + 1) if in_chunk % n == 0])
                raise ValueError(f"actor.recompute.layers={recompute.layers} must divide the {in_chunk} layers of a chunk; use {fitting}")
            return
        absent = {"mlp"} if self.experts else {"moe", "moe_act"}
        for module in recompute.modules:
            if module in absent:
                kind = "experts in place of an mlp" if self.experts else "no experts"
                raise ValueError(f"actor.recompute.modules has {module!r}, but model_type={self.family} has {kind}; take it out")

    def _check_experts(self, layout: LayoutSettings) -> None:
        if self.experts is None:
            if layout.ep * layout.etp > 1:
                raise ValueError(f"actor.layout.ep={layout.ep}, etp={layout.etp}: model_type={self.family} has no experts; set both to 1")
            return
        if self.experts.num_experts % layout.ep:
            raise ValueError(f"actor.layout.ep={layout.ep} must divide num_experts={self.experts.num_experts}; use a smaller ep")
        if self.experts.ffn_hidden_size % layout.etp:
            size = self.experts.ffn_hidden_size
            raise ValueError(f"actor.layout.etp={layout.etp} must divide moe_intermediate_size={size}; use a smaller etp")
        if layout.ep == 1 and layout.etp != layout.tp:
            raise ValueError(
                f"actor.layout.etp={layout.etp} must equal tp={layout.tp} where ep=1, since megatron-core 0.16.1 then leaves the experts' "
                f"gradients unsummed; set etp to {layout.tp} or raise ep"
            )
        if layout.tp > 1 and not layout.sequence_parallel:
            raise ValueError(
                f"actor.layout.tp={layout.tp} with experts needs sequence parallelism; set actor.layout.sequence_parallel to true"
            )


def _one_of(sizes: list[int]) -> str:
    return " or ".join(filter(None, [", ".join(map(str, sizes[:-1])), str(sizes[-1])]))


def read_architecture(model_path: Path) -> Architecture:
    """Raises ValueError naming the file and the key where `model_path` is no folder of a supported model."""
    config_path = model_path / "config.json"
    try:
        values = json.loads(config_path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"model.path={model_path}: cannot read config.json ({error.strerror}); give a Hugging Face model folder"
        ) from error
    except ValueError as error:
        raise ValueError(f"{config_path}: not valid JSON ({error}); the file is damaged, fetch the model again") from error
    return architecture_from_config(values, str(config_path))


def architecture_from_config(values: dict[str, Any], source: str) -> Architecture:
    """`values` as in config.json; `source` names it in errors."""
    if not isinstance(values, dict):
        raise ValueError(f"{source}: holds a {type(values).__name__}; give the config.json of a Hugging Face model")
    _check_numbers(values, source)
    family = values.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{source}: model_type={family!r} is not supported; use one of {', '.join(FAMILIES)}")
    rope = values.get("rope_parameters") or {**(values.get("rope_scaling") or {}), "rope_theta": values.get("rope_theta")}
    if values.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{source}: hidden_act={values['hidden_act']!r} is not supported; only silu is")
    if values.get("mlp_bias") or (family != "qwen2" and values.get("attention_bias")):
        raise ValueError(f"{source}: attention_bias and mlp_bias are not supported for {family}; use a model without them")
    try:
        num_heads = values["num_attention_heads"]
        return Architecture(
            family=family,
            num_layers=values["num_hidden_layers"],
            hidden_size=values["hidden_size"],
            ffn_hidden_size=values["intermediate_size"],
            experts=_experts(values, source) if family == "qwen3_moe" else None,
            num_heads=num_heads,
            num_kv_heads=values.get("num_key_value_heads") or num_heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // num_heads,
            vocab_size=values["vocab_size"],
            tied_embeddings=values.get("tie_word_embeddings", False),
            norm_eps=values.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or values.get("rope_theta") or 10000.0),
            rope_scaling=_rope_scaling(rope, source),
            max_positions=values["max_position_embeddings"],
            qkv_bias=family == "qwen2",
            qk_norm=family in ("qwen3", "qwen3_moe"),
        )
    except KeyError as error:
        raise ValueError(f"{source}: key {error} is missing; the file does not describe a {family} model") from error


_NUMBERS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
)  # fmt: skip


def _check_numbers(values: dict[str, Any], source: str) -> None:
    for name in _NUMBERS:
        value = values.get(name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{source}: {name}={value!r} must be a positive whole number; the file is damaged, fetch the model again")
    heads, kv_heads = values.get("num_attention_heads") or 1, values.get("num_key_value_heads") or 1
    if heads % kv_heads:
        raise ValueError(f"{source}: num_key_value_heads={kv_heads} must divide num_attention_heads={heads}")
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(values.get(name) or {}, dict):
            raise ValueError(f"{source}: {name}={values[name]!r} must be an object; the file is damaged, fetch the model again")


def _experts(values: dict[str, Any], source: str) -> Experts:
    if values.get("decoder_sparse_step", 1) != 1 or values.get("mlp_only_layers"):
        raise ValueError(f"{source}: dense layers between the expert layers (decoder_sparse_step, mlp_only_layers) are not supported")
    return Experts(
        num_experts=values.get("num_experts") or values["num_local_experts"],
        num_active=values["num_experts_per_tok"],
        ffn_hidden_size=values["moe_intermediate_size"],
        normalize_weights=values.get("norm_topk_prob", False),
    )


def _rope_scaling(rope: dict[str, Any], source: str) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"{source}: rope scaling {kind!r} is not supported; use a model with Llama 3's scaling or none")
    return RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_positions=rope["original_max_position_embeddings"],
    )
