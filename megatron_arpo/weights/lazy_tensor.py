"""Tensors whose dtype and shape are known before a byte of them is read, and whose rows are read a block at a time.

What conversion does to a tensor is to take whole rows of other tensors, or boxes of columns where tensor parallelism cut them. So a
tensor is described once and then streams through a block of memory, whatever its size. A row is an index of the first
dimension; a vector has rows of one element.
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

_BLOCK_BYTES = 2 << 20
"""Small enough to stay in a processor's cache between being read and being written; 8 MiB take twice the processor time."""


class LazyTensor(Protocol):
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read_rows(self, start: int, out: torch.Tensor) -> None:
        """Fills `out` [num_rows, num_columns], contiguous and of this dtype, with the rows from `start` on. Raises ValueError
        naming the file where it ends too early."""


def num_rows(tensor: LazyTensor) -> int:
    return tensor.shape[0] if tensor.shape else 1


def num_columns(tensor: LazyTensor) -> int:
    return math.prod(tensor.shape[1:])


def num_bytes(tensor: LazyTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def rows_in_block(tensor: LazyTensor) -> int:
    """Rows that fit into one block of memory, at least one."""
    return max(1, _BLOCK_BYTES // max(1, num_columns(tensor) * tensor.dtype.itemsize))


def read_whole(tensor: LazyTensor) -> torch.Tensor:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    rows = whole.view(num_rows(tensor), num_columns(tensor))
    step = rows_in_block(tensor)
    for start in range(0, len(rows), step):
        tensor.read_rows(start, rows[start : start + step])
    return whole


def bytes_of(rows: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(rows.reshape(-1).view(torch.uint8).numpy())


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Contiguous in a file, `offset` bytes from its start. Read with pread: nothing is mapped, so nothing of the file counts as
    this process's memory."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read_rows(self, start: int, out: torch.Tensor) -> None:
        left, place = bytes_of(out), self.offset + start * num_columns(self) * self.dtype.itemsize
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            while left:
                done = os.preadv(descriptor, [left], place)
                if not done:
                    raise ValueError(f"{self.path}: ends at byte {place}, within a tensor; the file is truncated, copy it again")
                left, place = left[done:], place + done
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """Already in memory."""

    tensor: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read_rows(self, start: int, out: torch.Tensor) -> None:
        out.copy_(torch.atleast_1d(self.tensor)[start : start + len(out)].reshape(out.shape))


@dataclass(frozen=True, slots=True)
class CastTensor:
    """Another tensor in another dtype."""

    tensor: LazyTensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def read_rows(self, start: int, out: torch.Tensor) -> None:
        rows = torch.empty(out.shape, dtype=self.tensor.dtype)
        self.tensor.read_rows(start, rows)
        out.copy_(rows)


@dataclass(frozen=True, slots=True)
class RowRun:
    """`num_rows` rows of a tensor from `start` on, or as many rows of zeros."""

    tensor: LazyTensor | None
    start: int
    num_rows: int


class JoinedTensor:
    """Runs of rows of other tensors, one behind the other; all have its dtype and its columns."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], runs: Sequence[RowRun]) -> None:
        self.dtype, self.shape, self._runs = dtype, shape, runs
        self._ends: list[int] = []
        for run in runs:
            self._ends.append(run.num_rows + (self._ends[-1] if self._ends else 0))
        if other := {run.tensor.dtype for run in runs if run.tensor is not None} - {dtype}:
            raise ValueError(f"rows of {dtype} and of {', '.join(map(str, other))} can't make one tensor")
        if self._ends[-1] != shape[0]:
            raise ValueError(f"runs of {self._ends[-1]} rows don't make a tensor of shape {shape}")

    def read_rows(self, start: int, out: torch.Tensor) -> None:
        index, filled = bisect.bisect_right(self._ends, start), 0
        while filled < len(out):
            run, end = self._runs[index], self._ends[index]
            skipped = start + filled - (end - run.num_rows)
            rows = out[filled : filled + run.num_rows - skipped]
            if run.tensor is None:
                rows.zero_()
            else:
                run.tensor.read_rows(run.start + skipped, rows)
            filled, index = filled + len(rows), index + 1


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a larger matrix, its first element at (row, column) there."""

    tensor: LazyTensor
    row: int
    column: int


class TiledTensor:
    """Put together from tiles that cover it, as tensor-parallel ranks saved it. Raises ValueError where they don't."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], tiles: Sequence[Tile]) -> None:
        self.dtype, self.shape, self._tiles = dtype, shape, tiles
        covered = sum(math.prod(tile.tensor.shape) for tile in tiles)
        if covered != math.prod(shape):
            raise ValueError(f"parts of {covered} elements don't make a tensor of shape {shape}")

    def read_rows(self, start: int, out: torch.Tensor) -> None:
        for tile in self._tiles:
            first, last = max(start, tile.row), min(start + len(out), tile.row + tile.tensor.shape[0])
            if first >= last:
                continue
            rows, width = out[first - start : last - start], num_columns(tile.tensor)
            if width == rows.shape[1]:
                tile.tensor.read_rows(first - tile.row, rows)
            else:
                part = torch.empty((len(rows), width), dtype=self.dtype)
                tile.tensor.read_rows(first - tile.row, part)
                rows[:, tile.column : tile.column + width] = part
