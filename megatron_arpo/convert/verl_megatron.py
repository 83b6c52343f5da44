"""verl's Megatron checkpoints before it used dist-checkpoints: model/mp_rank_TT[_PPP]/model.pt, a list of the state dicts of
the rank's model chunks.

That version saved the first data-parallel rank alone, so with expert parallelism the other ranks' experts are in no file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from megatron_arpo.convert.fuse import runs_of
from megatron_arpo.convert.saved_files import load_without_bytes, stored_tensor
from megatron_arpo.families.names import canonical, hf_names, shard
from megatron_arpo.families.parameters import Parameter
from megatron_arpo.weights.lazy_tensor import LazyTensor, StoredTensor, Tile, TiledTensor

RANK_FILES = "mp_rank_*/model.pt"
_FOLDER = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_NOT_WEIGHTS = ("_extra_state", "inv_freq")


def read_ranks(folder: Path) -> dict[Parameter, LazyTensor]:
    """Whole Megatron tensors, of the folder that holds mp_rank_*. Raises ValueError where ranks are missing or hold what no
    model of ours has."""
    files = _rank_files(folder)
    tp, pp = (1 + max(rank[axis] for rank in files) for axis in (0, 1))
    loaded = {rank: load_without_bytes(path) for rank, path in files.items()}
    found: dict[Parameter, LazyTensor] = {}
    first_layer = 0
    for chunk in range(len(loaded[0, 0])):
        for stage in range(pp):
            layers = {int(match[1]) for key in loaded[0, stage][chunk] if (match := _LAYER.fullmatch(key))}
            for rank in range(1, tp):
                if loaded[rank, stage][chunk].keys() != loaded[0, stage][chunk].keys():
                    raise ValueError(f"{files[rank, stage]}: has other tensors than {files[0, stage]}; copy all ranks of one checkpoint")
            for key in loaded[0, stage][chunk]:
                if not key.endswith(_NOT_WEIGHTS):
                    parts = [(files[rank, stage], loaded[rank, stage][chunk][key]) for rank in range(tp)]
                    parameter = _parameter(folder, key, first_layer)
                    found[parameter] = _whole(parameter.name, parts)
            first_layer += len(layers)
    return found


def _rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """By tensor-parallel and pipeline rank."""
    found: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob(RANK_FILES)):
        match = _FOLDER.fullmatch(path.parent.name)
        if match is None:
            raise ValueError(
                f"{path.parent}: expert-parallel ranks are not supported, since verl saved the experts of the first one only; "
                f"use a checkpoint with dist_ckpt/, or one that was written without expert parallelism"
            )
        found[int(match[1]), int(match[2] or 0)] = path
    tp, pp = (1 + max(rank[axis] for rank in found) for axis in (0, 1))
    for rank in ((tensor, stage) for tensor in range(tp) for stage in range(pp)):
        if rank not in found:
            raise ValueError(f"{folder}: the file of tensor-parallel rank {rank[0]}, pipeline stage {rank[1]} is missing; copy all of them")
    return found


def _parameter(folder: Path, key: str, first_layer: int) -> Parameter:
    match = _LAYER.fullmatch(key)
    name, expert = canonical(match[2]) if match else (key, None)
    parameter = Parameter(name, first_layer + int(match[1]) if match else None, expert)
    try:
        hf_names(parameter.name, parameter.layer, parameter.expert)
    except KeyError as error:
        raise ValueError(f"{folder}: tensor {key} is of no supported family (Qwen2, Qwen3, Qwen3-MoE, Llama)") from error
    return parameter


def _whole(name: str, parts: list[tuple[Path, Any]]) -> LazyTensor:
    """Of the slices of all tensor-parallel ranks, by the rule that cuts them in families/names.py."""
    slices = [stored_tensor(path, tensor) for path, tensor in parts]
    tp, first = len(slices), slices[0]
    cut = shard(name, torch.zeros(2 * tp, tp), tp, 0).shape
    if cut == (2 * tp, tp):
        return first
    if cut[0] == 2 * tp:
        tiles = [Tile(part, 0, rank * first.shape[1]) for rank, part in enumerate(slices)]
        return TiledTensor(first.dtype, (first.shape[0], tp * first.shape[1]), tiles)
    num_rows, tiles = tp * first.shape[0], []
    for rank, part in enumerate(slices):
        start = 0
        for row, count in runs_of(shard(name, torch.arange(num_rows)[:, None], tp, rank)[:, 0]):
            tiles.append(Tile(_rows(part, start, count), row, 0))
            start += count
    return TiledTensor(first.dtype, (num_rows, *first.shape[1:]), tiles)


def _rows(part: StoredTensor, start: int, count: int) -> StoredTensor:
    row_bytes = part.dtype.itemsize * (part.shape[1] if len(part.shape) > 1 else 1)
    return StoredTensor(part.path, part.offset + start * row_bytes, part.dtype, (count, *part.shape[1:]))
