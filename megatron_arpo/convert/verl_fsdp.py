"""verl's FSDP checkpoints: one model_world_size_W_rank_R.pt a rank, in which every tensor is a DTensor of the rank's rows.

Rows are cut unevenly where the ranks don't divide them. With a replicated mesh dimension (hybrid sharding) the first replica's ranks
come first. Tensors under Hugging Face names already.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Shard

from megatron_arpo.convert.saved_files import load_without_bytes, stored_tensor
from megatron_arpo.weights.lazy_tensor import LazyTensor, Tile, TiledTensor

_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


def is_fsdp_folder(folder: Path) -> bool:
    return any(_FILE.fullmatch(path.name) for path in folder.glob("model_world_size_*_rank_*.pt"))


def read_fsdp(folder: Path) -> dict[str, LazyTensor]:
    """Whole tensors by Hugging Face name. Raises ValueError where ranks are missing or cut in a way that FSDP alone does not cut."""
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)  # warns of meshes that are read without their processes
    paths = _rank_files(folder)
    ranks = [load_without_bytes(path) for path in paths]
    for path, rank in zip(paths, ranks, strict=True):
        if rank.keys() != ranks[0].keys():
            raise ValueError(f"{path}: has other tensors than {paths[0].name}; copy the files of all ranks of one checkpoint")
    return {name: _whole(folder, name, [(path, rank[name]) for path, rank in zip(paths, ranks, strict=True)]) for name in ranks[0]}


def _rank_files(folder: Path) -> list[Path]:
    found = {
        tuple(map(int, _FILE.fullmatch(path.name).groups())): path
        for path in folder.glob("model_world_size_*")
        if _FILE.fullmatch(path.name)
    }
    sizes = sorted({size for size, _ in found})
    if len(sizes) > 1:
        raise ValueError(f"{folder}: has ranks of world sizes {' and '.join(map(str, sizes))}; keep the files of one of them")
    for rank in range(sizes[0]):
        if (sizes[0], rank) not in found:
            raise ValueError(f"{folder / f'model_world_size_{sizes[0]}_rank_{rank}.pt'} is missing; copy the files of all ranks")
    return [found[sizes[0], rank] for rank in range(sizes[0])]


def _whole(folder: Path, name: str, parts: list[tuple[Path, torch.Tensor]]) -> LazyTensor:
    first = parts[0][1]
    if not isinstance(first, DTensor):
        if len(parts) > 1:
            raise ValueError(f"{folder}: {name} is not a DTensor; checkpoints of FSDP without a device mesh can't be put together")
        return stored_tensor(parts[0][0], first)
    cut = [placement.dim for placement in first.placements if isinstance(placement, Shard)]
    if len(cut) > 1 or (cut and cut[0] > 1) or first.ndim > 2:
        raise ValueError(
            f"{folder}: {name} is cut as {first.placements}; only FSDP and hybrid FSDP, without tensor parallelism, can be read"
        )
    shape, tiles, place = tuple(first.shape), [], 0
    if not cut:
        return stored_tensor(parts[0][0], first._local_tensor)
    for path, tensor in parts:
        local = tensor._local_tensor
        if place < shape[cut[0]] and local.numel():
            tiles.append(Tile(stored_tensor(path, local), *((place, 0) if cut[0] == 0 else (0, place))))
            place += local.shape[cut[0]]
    try:
        return TiledTensor(first.dtype, shape, tiles)
    except ValueError as error:
        raise ValueError(f"{folder}: {name} is not whole ({error}); copy the files of all ranks again") from error
