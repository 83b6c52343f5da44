"""Where the tensors of a file that torch.save wrote lie in it, without reading them."""

from __future__ import annotations

import io
import math
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_arpo.weights.lazy_tensor import StoredTensor


class SavedTensor:
    """One tensor that torch.save wrote into `length` bytes of a file, as distributed checkpoints have them; where in them is
    looked up when it is first read. Raises ValueError where it is damaged or not what the metadata says."""

    def __init__(self, path: Path, offset: int, length: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape
        self._path, self._offset, self._length = path, offset, length
        self._stored: StoredTensor | None = None

    def read_rows(self, start: int, out: torch.Tensor) -> None:
        if self._stored is None:
            self._stored = self._find()
        self._stored.read_rows(start, out)

    def _find(self) -> StoredTensor:
        """Not by `load_without_bytes`, which takes longer for one tensor than reading it."""
        with open(self._path, "rb") as file:
            part = _Part(file, self._offset, self._length)
            try:
                with torch.serialization.skip_data():  # its memory is reserved and never touched
                    found = torch.load(part, map_location="cpu", weights_only=True)
                place = _only_storage(part)
            except Exception as error:  # whatever a damaged file makes torch's unpickler and the zip reader raise
                raise ValueError(f"{self._path}: cannot be read ({_line(error)}); it is truncated or damaged, copy it again") from error
        if found.dtype != self.dtype or found.numel() != math.prod(self.shape) or not found.is_contiguous() or found.storage_offset():
            raise ValueError(
                f"{self._path}: holds a tensor of {found.dtype}, {tuple(found.shape)}, strides {found.stride()}, where .metadata has a "
                f"contiguous one of {self.dtype}, {self.shape}"
            )
        return StoredTensor(self._path, self._offset + place, self.dtype, self.shape)


def _only_storage(part: _Part) -> int:
    """Where the bytes of the one storage begin in what torch.save wrote: behind a zip record's header of 30 bytes and two texts."""
    with zipfile.ZipFile(part) as archive:
        (record,) = [one for one in archive.infolist() if one.filename.endswith("/data/0")]
    part.seek(record.header_offset)
    header = part.read(30)
    return record.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def load_without_bytes(path: Path) -> Any:
    """What torch.load gives, tensors without their bytes; `stored_tensor` finds those. Nothing but tensors, plain containers and
    torch's distributed tensors is unpickled. Raises ValueError where the file is damaged."""
    try:
        with FakeTensorMode(), torch.serialization.safe_globals([io.BytesIO]):  # as Transformer Engine keeps extra states
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes torch's unpickler and zip reader raise
        if unknown := re.search(r"Unsupported global: GLOBAL (\S+)", str(error)):
            raise ValueError(f"{path}: holds a {unknown[1]}; only tensors and torch's distributed tensors are read") from error
        raise ValueError(f"{path}: cannot be read ({_line(error)}); it is truncated or damaged, copy it again") from error


def stored_tensor(path: Path, tensor: torch.Tensor) -> StoredTensor:
    """The place of a tensor of `load_without_bytes`."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{path}: holds a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()}; only contiguous ones can be read"
        )
    start = tensor.untyped_storage()._checkpoint_offset + tensor.storage_offset() * tensor.dtype.itemsize
    return StoredTensor(path, start, tensor.dtype, tuple(tensor.shape))


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


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
