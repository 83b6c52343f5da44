"""Streams many lazy tensors to known places in files, a block at a time, in as many threads as asked for."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_arpo.weights.lazy_tensor import LazyTensor, bytes_of, num_columns, num_rows, rows_in_block


@dataclass(frozen=True, slots=True)
class Placement:
    """A tensor's bytes go to `path`, which exists, from `offset` on."""

    path: Path
    offset: int
    tensor: LazyTensor


@dataclass(frozen=True, slots=True)
class _Block:
    descriptor: int
    offset: int
    tensor: LazyTensor
    start: int
    num_rows: int


def write_tensors(placements: Sequence[Placement], workers: int) -> None:
    """A thread holds one block, so memory does not depend on the tensors' sizes. The first failure of a thread stops all and is
    raised. Bringing the files to the disk is left to the caller."""
    descriptors = {path: os.open(path, os.O_WRONLY) for path in dict.fromkeys(placement.path for placement in placements)}
    try:
        blocks = _Shared(_blocks(placements, descriptors))
        threads = [threading.Thread(target=_write_blocks, args=(blocks,), daemon=True) for _ in range(workers)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            blocks.stop()
            for thread in threads:
                thread.join()
        if blocks.failure is not None:
            raise blocks.failure
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


class _Shared:
    """The blocks still to be written, handed out to threads until one fails or `stop` is called."""

    def __init__(self, blocks: Iterator[_Block]) -> None:
        self._blocks, self._lock, self._stopped = blocks, threading.Lock(), False
        self.failure: BaseException | None = None

    def next(self) -> _Block | None:
        with self._lock:
            return None if self._stopped else next(self._blocks, None)

    def stop(self, failure: BaseException | None = None) -> None:
        with self._lock:
            self._stopped = True
            self.failure = self.failure or failure


def _blocks(placements: Sequence[Placement], descriptors: dict[Path, int]) -> Iterator[_Block]:
    """File by file in turn, so that threads meet in one file, whose writes the kernel makes one after the other, as seldom as
    can be."""
    by_file: dict[Path, list[Placement]] = {}
    for placement in placements:
        by_file.setdefault(placement.path, []).append(placement)
    for placement in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*by_file.values()))):
        tensor, step = placement.tensor, rows_in_block(placement.tensor)
        row_bytes = num_columns(tensor) * tensor.dtype.itemsize
        for start in range(0, num_rows(tensor), step):
            yield _Block(
                descriptors[placement.path], placement.offset + start * row_bytes, tensor, start, min(step, num_rows(tensor) - start)
            )


def _write_blocks(blocks: _Shared) -> None:
    scratch = torch.empty(0, dtype=torch.uint8)
    try:
        while (block := blocks.next()) is not None:
            tensor = block.tensor
            size = block.num_rows * num_columns(tensor) * tensor.dtype.itemsize
            if len(scratch) < size:
                scratch = torch.empty(size, dtype=torch.uint8)
            rows = scratch[:size].view(tensor.dtype).view(block.num_rows, num_columns(tensor))
            tensor.read_rows(block.start, rows)
            _write(block.descriptor, bytes_of(rows), block.offset)
    except BaseException as error:
        blocks.stop(error)


def _write(descriptor: int, left: memoryview, offset: int) -> None:
    while left:
        done = os.pwrite(descriptor, left, offset)
        left, offset = left[done:], offset + done
