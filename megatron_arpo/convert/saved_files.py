"""Where the tensors of a file that torch.save wrote lie in it, without reading them."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_arpo.weights.lazy_tensor import StoredTensor, num_bytes


class SavedTensor:
    """One tensor that torch.save wrote into `length` bytes of a file, as distributed checkpoints have them; where in them is
    looked up when it is first read. Raises ValueError where the file ends before them."""

    def __init__(self, path: Path, offset: int, length: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape
        self._path, self._offset, self._length = path, offset, length
        self._stored: StoredTensor | None = None

    def read_rows(self, start: int, out: torch.Tensor) -> None:
        if self._stored is None:
            with open(self._path, "rb") as file:
                found = _load(_Part(file, self._offset, self._length), self._path)
            stored = stored_tensor(self._path, found, self._offset)
            if stored.dtype != self.dtype or num_bytes(stored) != num_bytes(self):
                raise ValueError(
                    f"{self._path}: holds a tensor of {stored.dtype}, {stored.shape} where .metadata has {self.dtype}, {self.shape}"
                )
            self._stored = StoredTensor(self._path, stored.offset, self.dtype, self.shape)
        self._stored.read_rows(start, out)


def load_without_bytes(path: Path) -> Any:
    """What torch.load gives, tensors without their bytes; `stored_tensor` finds those. Nothing but tensors, plain containers and
    torch's distributed tensors is unpickled. Raises ValueError where the file is damaged."""
    with open(path, "rb") as file:
        return _load(file, path)


def _load(file: Any, path: Path) -> Any:
    try:
        with FakeTensorMode(), torch.serialization.safe_globals([io.BytesIO]):  # as Transformer Engine keeps extra states
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes torch's unpickler and zip reader raise
        if unknown := re.search(r"Unsupported global: GLOBAL (\S+)", str(error)):
            raise ValueError(f"{path}: holds a {unknown[1]}; only tensors and torch's distributed tensors are read") from error
        raise ValueError(f"{path}: cannot be read ({str(error).splitlines()[0]}); it is truncated or damaged, copy it again") from error


def stored_tensor(path: Path, tensor: torch.Tensor, offset: int = 0) -> StoredTensor:
    """The place of a tensor of `load_without_bytes` in a file, or in the part of it that starts at `offset`."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{path}: holds a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()}; only contiguous ones can be read"
        )
    start = tensor.untyped_storage()._checkpoint_offset + tensor.storage_offset() * tensor.dtype.itemsize
    return StoredTensor(path, offset + start, tensor.dtype, tuple(tensor.shape))


class _Part(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._place = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer)[: max(0, self._length - self._place)]
        done = os.preadv(self._file.fileno(), [room], self._offset + self._place) if room else 0
        self._place += done
        return done
