"""Which part of which Hugging Face tensors a rank's slice of a Megatron parameter is, without gathering anything."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_arpo.families.architecture import Architecture
from megatron_arpo.families.names import is_vocabulary, split_dim
from megatron_arpo.types import Region


@dataclass(frozen=True, slots=True)
class Piece:
    """`blocks` [..., *tail] are the elements of `region` of a Hugging Face tensor of `shape`, a view of the local parameter; its
    leading dimensions, flattened into one, run along the region's rows."""

    shape: tuple[int, ...]
    region: Region
    blocks: torch.Tensor

    def view(self, box: Region) -> torch.Tensor | None:
        """The elements of `box` as they lie in the parameter, [..., *tail], rows in order, a vector's as one; None where the box cuts
        through a block."""
        if self.blocks.dim() == len(self.shape):
            return box.of(self.blocks)
        if box.start[0] or box.extent[0] != self.region.extent[0]:
            return None
        found = Region((0, 0, *box.start[1:]), (*self.blocks.shape[:2], *box.extent[1:])).of(self.blocks)
        return found.reshape(-1) if len(self.shape) == 1 else found

    def copy_to(self, target: torch.Tensor, box: Region) -> None:
        """Fills `target` [*box.extent] with the elements of `box`, which counts from the first element of the region."""
        columns = Region((0, *box.start[1:]), (0, *box.extent[1:]))
        row, end = box.start[0], box.start[0] + box.extent[0]
        is_blocked = self.blocks.dim() > len(self.shape)
        block_rows = self.blocks.shape[1] if is_blocked else end
        while row < end:
            block, offset = divmod(row, block_rows) if is_blocked else (0, row)
            taken = min(block_rows - offset, end - row)
            source = self.blocks[block] if is_blocked else self.blocks
            rows = Region((offset, *columns.start[1:]), (taken, *columns.extent[1:]))
            target.narrow(0, row - box.start[0], taken).copy_(rows.of(source))
            row += taken


def pieces(name: str, local: torch.Tensor, architecture: Architecture, tp: int, rank: int) -> list[Piece]:
    """One for each of `families.names.hf_names(name, ...)`, in that order. `local` is what tensor-parallel `rank` of `tp` holds of
    the parameter `name` (canonical). A piece without rows, as padding of the vocabulary can be, has an extent of 0."""
    if "linear_qkv" in name:
        return _query_key_value(local, architecture, tp, rank)
    dim = split_dim(name)
    if dim is None or tp == 1:
        tp, rank = 1, 0
    if is_vocabulary(name):
        rows, start = local.shape[0], rank * local.shape[0]
        kept = max(0, min(rows, architecture.vocab_size - start))
        shape = (architecture.vocab_size, *local.shape[1:])
        return [_piece(shape, 0, min(start, architecture.vocab_size), local[:kept])]
    halves = local.chunk(2) if "linear_fc1" in name else (local,)
    found = []
    for half in halves:
        split = dim or 0
        shape = list(half.shape)
        shape[split] *= tp
        found.append(_piece(tuple(shape), split, rank * half.shape[split], half))
    return found


def _piece(shape: tuple[int, ...], dim: int, start: int, blocks: torch.Tensor) -> Piece:
    starts = tuple(start if index == dim else 0 for index in range(len(shape)))
    return Piece(shape, Region(starts, tuple(blocks.shape)), blocks)


def _query_key_value(local: torch.Tensor, architecture: Architecture, tp: int, rank: int) -> list[Piece]:
    """Megatron lays [q..q, k, v] of each KV group one behind the other; groups are cut over the ranks."""
    groups, dim, tail = architecture.num_kv_heads // tp, architecture.head_dim, local.shape[1:]
    per_group = local.view(groups, -1, *tail)
    sizes = (per_group.shape[1] - 2 * dim, dim, dim)
    found = []
    for part, size in zip(per_group.split(sizes, dim=1), sizes, strict=True):
        rows = groups * size
        region = Region((rank * rows, *(0 for _ in tail)), (rows, *tail))
        found.append(Piece((tp * rows, *tail), region, part))
    return found
