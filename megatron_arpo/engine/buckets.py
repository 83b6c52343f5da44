"""Weights on their way to an engine: buckets of Hugging Face tensors, each tensor cut into the fragments that one actor rank sends.

The plan of a sync (weights/plan.py) is made of these records; both ends of a transport and the engine's workers read them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_arpo.types import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where a whole tensor lies in its bucket. `dtype` as torch names it, without the "torch."; `offset` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A box of a bucket's tensor (`tensor` counts its places) that actor rank `actor` sends to every one of `mailboxes`."""

    tensor: int
    region: Region
    actor: int
    mailboxes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tensors that travel together, whole tensors side by side in a buffer of `num_bytes`."""

    index: int
    places: tuple[TensorPlace, ...]
    fragments: tuple[Fragment, ...]

    @property
    def num_bytes(self) -> int:
        return max(place.offset + place.num_bytes for place in self.places)

    def fragment_bytes(self, fragment: Fragment) -> int:
        return fragment.region.numel * self.places[fragment.tensor].torch_dtype.itemsize

    def fragment_view(self, buffer: torch.Tensor, fragment: Fragment) -> torch.Tensor:
        """[*fragment.region.extent] in `buffer`, the bucket's bytes."""
        return fragment.region.of(tensor_at(buffer, self.places[fragment.tensor]))


def tensor_at(buffer: torch.Tensor, place: TensorPlace) -> torch.Tensor:
    """A view [*place.shape] into `buffer` (uint8)."""
    return buffer[place.offset : place.offset + place.num_bytes].view(place.torch_dtype).view(place.shape)


def plain(buckets: Sequence[Bucket]) -> list[dict[str, Any]]:
    """Plain types alone, as an engine's remote calls carry them."""
    return [dataclasses.asdict(bucket) for bucket in buckets]


def buckets_of(values: Sequence[Mapping[str, Any]]) -> tuple[Bucket, ...]:
    """Inverse of `plain`; tuples may have become lists on the way."""
    return tuple(
        Bucket(
            index=one["index"],
            places=tuple(TensorPlace(**place | {"shape": tuple(place["shape"])}) for place in one["places"]),
            fragments=tuple(
                Fragment(
                    tensor=fragment["tensor"],
                    region=Region(tuple(fragment["region"]["start"]), tuple(fragment["region"]["extent"])),
                    actor=fragment["actor"],
                    mailboxes=tuple(fragment["mailboxes"]),
                )
                for fragment in one["fragments"]
            ),
        )
        for one in values
    )


_LINE_WORDS = 64
_WEIGHT_STEP = -7046029254386353131
"""An odd 64-bit number, the golden ratio's, so that multiples of it differ in all bits."""


def checksum(tensor: torch.Tensor) -> str:
    """64 bits of a tensor's bytes, as 16 hex digits, equal on every device: sums of lines of 512 bytes, each weighted by its place.
    Any change of one value shows for certain, and moved lines do; the order within a line does not. Runs at the speed of memory."""
    lines = _words(tensor)
    lines = lines.unflatten(-1, (-1, math.gcd(lines.shape[-1], _LINE_WORDS)))
    sums = lines.sum(-1).reshape(-1)
    places = torch.arange(sums.numel(), device=sums.device, dtype=torch.int64)
    # odd weights: modulo 2**64 no difference is multiplied away
    return f"{int((sums * ((2 * places + 1) * _WEIGHT_STEP)).sum()) % 2**64:016x}"


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """[..., columns] int64 without a copy where the layout allows it, else of the bytes padded with zeros."""
    tensor = tensor.detach()
    if tensor.dim() < 2:
        tensor = tensor.reshape(1, -1)
    per_word = 8 // tensor.element_size()
    *strides, last = tensor.stride()
    if last == 1 and not any(size % per_word for size in (tensor.shape[-1], tensor.storage_offset(), *strides)):
        return tensor.view(torch.int64)
    raw = tensor.contiguous().view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, -raw.shape[-1] % 8)).view(torch.int64)
