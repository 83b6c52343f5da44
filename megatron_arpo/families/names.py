"""Where each Megatron parameter lives in a Hugging Face checkpoint, and how it is cut for tensor parallelism.

One table for Qwen2, Qwen2.5, QwQ, Qwen3, Qwen3-MoE and Llama, which name their tensors alike. Megatron fuses query, key and
value per KV group ([q..q, k, v] for each group) and gate with up; Hugging Face keeps them apart. Transformer Engine's layers
and Megatron's own name some parameters differently; the table knows them by one name (`canonical`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from megatron_arpo.families.architecture import Architecture

_GLOBAL = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "self_attention.linear_qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    "mlp.router.weight": ("mlp.gate.weight",),
}
_EXPERT = {
    "mlp.experts.linear_fc1.weight": ("gate_proj.weight", "up_proj.weight"),
    "mlp.experts.linear_fc2.weight": ("down_proj.weight",),
}
_TRANSFORMER_ENGINE = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12]\.weight)(\d+)")
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_SPLIT_DIM = {
    "embedding.word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "self_attention.linear_qkv.weight": 0,
    "self_attention.linear_qkv.bias": 0,
    "self_attention.linear_proj.weight": 1,
    "mlp.linear_fc1.weight": 0,
    "mlp.linear_fc2.weight": 1,
    "mlp.experts.linear_fc1.weight": 0,
    "mlp.experts.linear_fc2.weight": 1,
}


def canonical(megatron_name: str) -> tuple[str, int | None]:
    """(name in this table, index of the expert on its rank or None) of a parameter without its layer prefix.

    Example: "mlp.experts.local_experts.3.linear_fc1.weight" and Transformer Engine's "mlp.experts.linear_fc1.weight3" are both
    ("mlp.experts.linear_fc1.weight", 3).
    """
    if found := _LOCAL_EXPERT.fullmatch(megatron_name):
        return f"mlp.experts.{found[2]}", int(found[1])
    if found := _GROUPED_EXPERT.fullmatch(megatron_name):
        return f"mlp.experts.{found[1]}", int(found[2])
    return _TRANSFORMER_ENGINE.get(megatron_name, megatron_name), None


def hf_names(name: str, layer: int | None, expert: int | None = None) -> tuple[str, ...]:
    """Hugging Face names that make up one Megatron parameter. `name` is canonical; `layer` and `expert` count over the whole
    model. Raises KeyError for a name that no family has."""
    if layer is None:
        return (_GLOBAL[name],)
    if expert is not None:
        return tuple(f"model.layers.{layer}.mlp.experts.{expert}.{one}" for one in _EXPERT[name])
    return tuple(f"model.layers.{layer}.{one}" for one in _LAYER[name])


def to_megatron(megatron_name: str, parts: Mapping[str, torch.Tensor], architecture: Architecture, tp: int) -> torch.Tensor:
    """Fuses whole Hugging Face tensors, in the order of `hf_names`, into the whole Megatron tensor, vocabulary padded."""
    tensors = list(parts.values())
    if "linear_qkv" in megatron_name:
        groups, tail = architecture.num_kv_heads, tensors[0].shape[1:]
        return torch.cat([tensor.reshape(groups, -1, *tail) for tensor in tensors], dim=1).reshape(-1, *tail)
    whole = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    if megatron_name in _VOCABULARY:
        missing = architecture.padded_vocab_size(tp) - whole.shape[0]
        return torch.cat([whole, whole.new_zeros(missing, whole.shape[1])]) if missing else whole
    return whole


def to_hf(megatron_name: str, names: tuple[str, ...], whole: torch.Tensor, architecture: Architecture) -> dict[str, torch.Tensor]:
    """Inverse of `to_megatron`; `names` as `hf_names` gives them."""
    if "linear_qkv" in megatron_name:
        groups, tail, dim = architecture.num_kv_heads, whole.shape[1:], architecture.head_dim
        per_group = whole.reshape(groups, -1, *tail)
        sizes = [per_group.shape[1] - 2 * dim, dim, dim]
        tensors = [part.reshape(-1, *tail) for part in per_group.split(sizes, dim=1)]
    elif megatron_name in _VOCABULARY:
        tensors = [whole[: architecture.vocab_size]]
    else:
        tensors = list(whole.chunk(len(names)))
    return {name: tensor.contiguous() for name, tensor in zip(names, tensors, strict=True)}


def shard(megatron_name: str, whole: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """The slice of a whole Megatron tensor that tensor-parallel `rank` holds."""
    if tp == 1 or megatron_name not in _SPLIT_DIM:
        return whole
    if "linear_fc1" in megatron_name:  # gate and up are cut each
        return torch.cat([half.chunk(tp)[rank] for half in whole.chunk(2)])
    return whole.chunk(tp, _SPLIT_DIM[megatron_name])[rank]


def split_dim(megatron_name: str) -> int | None:
    """Dimension of the Megatron tensor that tensor parallelism cuts; None where every rank holds all of it."""
    return _SPLIT_DIM.get(megatron_name)


def is_vocabulary(megatron_name: str) -> bool:
    return megatron_name in _VOCABULARY
