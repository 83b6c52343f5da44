"""Weights in one flat file of shared memory: where each tensor lies, and its checksum.

The layout is fixed once; actor ranks write their tensors at the given offsets, the engine maps the file. A file is written
once under a name with its version and never changed, since an engine may still have it mapped.
"""

from __future__ import annotations

import math
import mmap
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_arpo.types import WeightManifest

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """`dtype` as torch names it, without the "torch."; `offset` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


def lay_out(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[TensorPlace, ...]:
    """(name, dtype, shape) in order -> places in one buffer, each aligned."""
    places, offset = [], 0
    for name, dtype, shape in tensors:
        place = TensorPlace(name=name, dtype=dtype, shape=tuple(shape), offset=offset)
        places.append(place)
        offset += -(-place.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(places)


def buffer_bytes(places: Sequence[TensorPlace]) -> int:
    return max((place.offset + place.num_bytes for place in places), default=0)


@contextmanager
def mapped(path: Path, num_bytes: int | None = None) -> Iterator[torch.Tensor]:
    """The file as one uint8 tensor; `num_bytes` makes room first."""
    with open(path, "r+b") as file:
        if num_bytes is not None:
            file.truncate(num_bytes)
        with_map = mmap.mmap(file.fileno(), 0)
    yield torch.frombuffer(with_map, dtype=torch.uint8)


def tensor_at(buffer: torch.Tensor, place: TensorPlace) -> torch.Tensor:
    raw = buffer[place.offset : place.offset + place.num_bytes]
    return raw.view(getattr(torch, place.dtype)).view(place.shape)


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the tensor's bytes."""
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def manifest_of(places: Sequence[TensorPlace], checksums: Mapping[str, int], version: int) -> WeightManifest:
    return WeightManifest(
        version=version,
        names=tuple(place.name for place in places),
        dtypes=tuple(place.dtype for place in places),
        shapes=tuple(place.shape for place in places),
        offsets=tuple(place.offset for place in places),
        checksums=tuple(checksums[place.name] for place in places),
    )


def places_of(manifest: WeightManifest) -> tuple[TensorPlace, ...]:
    columns = zip(manifest.names, manifest.dtypes, manifest.shapes, manifest.offsets, strict=True)
    return tuple(TensorPlace(name=name, dtype=dtype, shape=shape, offset=offset) for name, dtype, shape, offset in columns)


def check_buffer(buffer: torch.Tensor, manifest: WeightManifest) -> None:
    """Raises ValueError naming the first tensor whose bytes are not the manifest's."""
    for place, expected in zip(places_of(manifest), manifest.checksums, strict=True):
        if place.offset + place.num_bytes > buffer.numel():
            raise ValueError(f"weights version {manifest.version}: {place.name} lies behind the end of the buffer; the file is cut off")
        if checksum(tensor_at(buffer, place)) != expected:
            raise ValueError(f"weights version {manifest.version}: {place.name} has another checksum than its actor wrote")
