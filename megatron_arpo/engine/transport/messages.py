"""Fragments of a bucket packed one behind the other, for transports that send bytes rather than share memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_arpo.engine.buckets import Bucket, Fragment

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Fragments of one bucket that travel together, each at its offset in a buffer of `num_bytes`."""

    fragments: tuple[Fragment, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    def view(self, buffer: torch.Tensor, bucket: Bucket, fragment: Fragment) -> torch.Tensor:
        """[*fragment.region.extent] in `buffer`, the message's bytes."""
        start = self.offsets[self.fragments.index(fragment)]
        raw = buffer[start : start + bucket.fragment_bytes(fragment)]
        return raw.view(bucket.places[fragment.tensor].torch_dtype).view(fragment.region.extent)

    def unpack(self, buffer: torch.Tensor, bucket: Bucket, into: torch.Tensor) -> None:
        """Copies every fragment to its place in `into`, a buffer of the whole bucket."""
        for fragment in self.fragments:
            bucket.fragment_view(into, fragment).copy_(self.view(buffer, bucket, fragment))


def pack(bucket: Bucket, fragments: Sequence[Fragment]) -> Message:
    offsets, end = [], 0
    for fragment in fragments:
        offsets.append(end)
        end += -(-bucket.fragment_bytes(fragment) // _ALIGNMENT) * _ALIGNMENT
    return Message(fragments=tuple(fragments), offsets=tuple(offsets), num_bytes=end)
