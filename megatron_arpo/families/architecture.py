"""Hugging Face config.json -> the facts of a model that actor, weights and conversion need, whatever its family."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("qwen2", "qwen3", "llama")


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

    def padded_vocab_size(self, tp: int) -> int:
        """Vocabulary rounded up to a multiple of 128 on each of `tp` ranks; the extra rows never get probability.

        128 keeps the shared embedding's gradient bucket free of padding, which megatron-core 0.16.1 loses track of when it
        reads a `fully_reshardable` optimizer checkpoint on the last of several pipeline stages.
        """
        multiple = 128 * tp
        return -(-self.vocab_size // multiple) * multiple

    def check_layout(self, tp: int, pp: int) -> None:
        """Raises ValueError where the layout cannot split this model."""
        for name, size in (("num_attention_heads", self.num_heads), ("num_key_value_heads", self.num_kv_heads)):
            if size % tp:
                fitting = [n for n in range(1, size + 1) if self.num_heads % n == 0 and self.num_kv_heads % n == 0]
                raise ValueError(f"actor.layout.tp={tp} must divide {name}={size}; use {_one_of(fitting)}")
        if self.ffn_hidden_size % tp:
            raise ValueError(f"actor.layout.tp={tp} must divide intermediate_size={self.ffn_hidden_size}")
        if self.num_layers % pp:
            fitting = [n for n in range(1, self.num_layers + 1) if self.num_layers % n == 0]
            raise ValueError(f"actor.layout.pp={pp} must divide num_hidden_layers={self.num_layers}; use {_one_of(fitting)}")


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
    family = values.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{source}: model_type={family!r} is not supported; use one of {', '.join(FAMILIES)}")
    rope = values.get("rope_parameters") or {}
    scaling = values.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type != "default":
        raise ValueError(f"{source}: rope scaling {rope_type!r} is not supported yet; use a model without rope scaling")
    if values.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{source}: hidden_act={values['hidden_act']!r} is not supported; only silu is")
    try:
        num_heads = values["num_attention_heads"]
        return Architecture(
            family=family,
            num_layers=values["num_hidden_layers"],
            hidden_size=values["hidden_size"],
            ffn_hidden_size=values["intermediate_size"],
            num_heads=num_heads,
            num_kv_heads=values.get("num_key_value_heads", num_heads),
            head_dim=values.get("head_dim") or values["hidden_size"] // num_heads,
            vocab_size=values["vocab_size"],
            tied_embeddings=values.get("tie_word_embeddings", False),
            norm_eps=values.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or values.get("rope_theta") or 10000.0),
            max_positions=values["max_position_embeddings"],
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
        )
    except KeyError as error:
        raise ValueError(f"{source}: key {error} is missing; the file does not describe a {family} model") from error
