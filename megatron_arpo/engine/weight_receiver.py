"""An engine worker's side of a weight sync, whatever the engine: takes buckets, proves them, hands out tensors, keeps count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron_arpo.engine.buckets import buckets_of, checksum, tensor_at
from megatron_arpo.engine.slices import kept_region
from megatron_arpo.engine.transport.base import Connection
from megatron_arpo.engine.transport.open import open_inbox
from megatron_arpo.types import Region


class WeightReceiver:
    """Of the worker with tensor-parallel rank `rank`. Opening it may wait for the actors (broadcast)."""

    def __init__(self, connection: Connection, rank: int, device: torch.device) -> None:
        self._buckets = buckets_of(connection.buckets)
        self._mailbox = connection.mailboxes[rank]
        self._num_kv_heads, self._tp, self._rank = connection.num_kv_heads, len(connection.mailboxes), rank
        self._inbox = open_inbox(connection.route, self._buckets, self._mailbox, device)
        self._keeps_buckets = connection.route.staged
        self._version: int | None = None
        self._received: set[int] = set()
        self._taken: set[int] = set()

    def begin(self) -> None:
        """Forgets what was received before."""
        self._version = None

    def receive(self, version: int, index: int) -> None:
        if version != self._version:
            self._version = version
            self._received.clear()
            self._taken.clear()
        self._inbox.receive(self._buckets[index])
        self._received.add(index)

    def check(self, version: int, index: int, checksums: Sequence[str]) -> None:
        """`checksums` has one for each fragment of the bucket. Raises ValueError for the first fragment that this worker needs and
        that is not as its actor wrote it."""
        buffer, bucket = self._buffer(version, index), self._buckets[index]
        for fragment, expected in zip(bucket.fragments, checksums, strict=True):
            place = bucket.places[fragment.tensor]
            kept = kept_region(place.name, place.shape, self._num_kv_heads, self._tp, self._rank)
            if self._mailbox not in fragment.mailboxes or not fragment.region.intersect(kept):
                continue
            if checksum(bucket.fragment_view(buffer, fragment)) != expected:
                raise ValueError(f"{_what(place.name, fragment.region)} has another checksum than its actor wrote")

    def tensors(self, version: int, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of a received bucket; of each tensor only what this worker keeps is sure to be there. Views into the
        transport's memory, good until the bucket's place is used again."""
        buffer = self._buffer(version, index)
        for place in self._buckets[index].places:
            yield place.name, tensor_at(buffer, place)
        self._taken.add(index)

    @property
    def keeps_buckets(self) -> bool:
        """Every bucket has a place of its own; else places are used in turn."""
        return self._keeps_buckets

    def lies_in(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is a view into the place of bucket `index`."""
        buffer = self._inbox.buffer(self._buckets[index])
        return 0 <= tensor.data_ptr() - buffer.data_ptr() < buffer.numel()

    def check_complete(self, version: int) -> None:
        """Raises ValueError unless every tensor of every bucket of `version` has been received and taken."""
        done = self._received & self._taken if version == self._version else set()
        if missing := sorted(set(range(len(self._buckets))) - done):
            raise ValueError(f"weights version {version}: buckets {missing} of {len(self._buckets)} have not been loaded")

    def close(self) -> None:
        self._inbox.close()

    def _buffer(self, version: int, index: int) -> torch.Tensor:
        if version != self._version or index not in self._received:
            raise ValueError(f"weights version {version}: bucket {index} has not been received")
        return self._inbox.buffer(self._buckets[index])


def _what(name: str, region: Region) -> str:
    return f"{name}[{', '.join(f'{first}:{end}' for first, end in zip(region.start, region.end, strict=True))}]"
