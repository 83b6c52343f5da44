"""Which part of each Hugging Face tensor one rank of a tensor-parallel engine keeps, for vLLM's and SGLang's way to cut models.

A name that no rule knows is kept whole, which is always right and only costs bytes.
"""

from __future__ import annotations

import re

from megatron_arpo.types import Region

_BY_ROWS = re.compile(r".*\.(gate_proj|up_proj)\.(weight|bias)")
_BY_HEADS = re.compile(r".*\.(q_proj|k_proj|v_proj)\.(weight|bias)")
_BY_COLUMNS = re.compile(r".*\.(o_proj|down_proj)\.weight")
_VOCABULARY = re.compile(r"(.*\.)?(embed_tokens|lm_head)\.weight")
_VOCABULARY_MULTIPLE = 64
"""The engines pad the vocabulary to a multiple of this before they cut it."""

_RELOADED_TOGETHER = (
    (re.compile(r"(.*)\.mlp\.experts\..*"), r"\1.mlp.experts"),
    (re.compile(r"(.*)\.(q_proj|k_proj|v_proj)\..*"), r"\1.qkv_proj"),
    (re.compile(r"(.*)\.(gate_proj|up_proj)\..*"), r"\1.gate_up_proj"),
    (re.compile(r"(.*)\.(weight|bias|weight_scale_inv)"), r"\1"),
)


def kept_region(name: str, shape: tuple[int, ...], num_kv_heads: int, tp: int, rank: int) -> Region:
    """Of the Hugging Face tensor `name`. With more ranks than KV heads, several ranks keep the same head."""
    whole = Region.whole(shape)
    if tp == 1:
        return whole
    if _VOCABULARY.fullmatch(name):
        padded = -(-shape[0] // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        return _cut(whole, 0, padded // tp, rank)
    if _BY_HEADS.fullmatch(name):
        if ".q_proj." not in name and tp > num_kv_heads:
            return _cut(whole, 0, shape[0] // num_kv_heads, rank // (tp // num_kv_heads))
        return _cut(whole, 0, shape[0] // tp, rank)
    if _BY_ROWS.fullmatch(name):
        return _cut(whole, 0, shape[0] // tp, rank)
    if _BY_COLUMNS.fullmatch(name):
        return _cut(whole, 1, shape[1] // tp, rank)
    return whole


def _cut(whole: Region, dim: int, size: int, index: int) -> Region:
    """Slice `index` of `size` along `dim`, as far as the tensor reaches."""
    start = min(size * index, whole.extent[dim])
    extent = min(size, whole.extent[dim] - start)
    starts, extents = list(whole.start), list(whole.extent)
    starts[dim], extents[dim] = start, extent
    return Region(tuple(starts), tuple(extents))


def reload_group(name: str) -> str:
    """Tensors of one group belong to one layer object of the engine, which takes its new weights once all of them are there."""
    for pattern, group in _RELOADED_TOGETHER:
        if pattern.fullmatch(name):
            return pattern.sub(group, name)
    return name
