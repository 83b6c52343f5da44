"""How the bytes of a bucket come from actor ranks to the workers of an engine. Each transport is one file with both of its ends.

The driver (weights/sync.py) names a bucket to both ends; a transport moves it and knows nothing of models or versions served.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field

from megatron_arpo.engine.buckets import Bucket, Fragment

IN_FLIGHT = 2
"""Buckets that exist at once where the engine takes them as they come: one is filled while the other is loaded."""


class Outbox(Protocol):
    """An actor rank's end."""

    def target(self, bucket: Bucket, fragment: Fragment) -> torch.Tensor:
        """Where the rank writes one of its fragments, [*fragment.region.extent], before it calls `send`."""
        ...

    def send(self, bucket: Bucket) -> None:
        """The rank's fragments of `bucket` are written: hands them over."""
        ...

    def close(self) -> None: ...


class Inbox(Protocol):
    """An engine worker's end."""

    def receive(self, bucket: Bucket) -> None:
        """Takes the bucket, once all actor ranks have sent it or while they do. Raises RuntimeError where the other side is gone."""
        ...

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        """The received bucket, uint8 [bucket.num_bytes]; what this worker doesn't need of it may be anything."""
        ...

    def close(self) -> None: ...


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FilesRoute(_Plain):
    """Files that both sides map: in shared memory on one host, or on a disk that both see."""

    kind: Literal["files"] = "files"
    folder: Path
    names: tuple[str, ...]
    """Of each bucket's file, or empty where IN_FLIGHT files are used in turn."""

    starts: tuple[int, ...]
    """Bytes of each named file before its bucket."""

    @property
    def staged(self) -> bool:
        return bool(self.names)


class BroadcastRoute(_Plain):
    """Process groups of torch.distributed over actor ranks and engine workers."""

    kind: Literal["broadcast"] = "broadcast"
    host: str
    port: int
    """Of the store that actor rank 0 keeps open (`open_store`)."""
    name: str
    """Differs from connection to connection, so that one store serves several."""
    staged: bool
    timeout_s: float


class CudaIpcRoute(_Plain):
    """Buffers on actor ranks' GPUs that the engine's workers on the same host open; `handles[a]` are those of actor rank a."""

    kind: Literal["cuda_ipc"] = "cuda_ipc"
    staged: Literal[False] = False
    handles: tuple[str, ...] = ()


Route = Annotated[FilesRoute | BroadcastRoute | CudaIpcRoute, Field(discriminator="kind")]


class Connection(_Plain):
    """What an engine's workers are told once; `model_dump(mode="json")` is what remote calls carry."""

    route: Route
    buckets: list[dict[str, Any]]
    """As engine/buckets.py makes them plain."""

    num_kv_heads: int
    mailboxes: tuple[int, ...]
    """The mailbox of each of the engine's workers, by its tensor-parallel rank."""


class Slots:
    """Buffers of an inbox: one for each bucket where `staged`, else IN_FLIGHT in turn. Made once and kept."""

    def __init__(self, buckets: Sequence[Bucket], staged: bool, device: torch.device) -> None:
        self._count = len(buckets) if staged else min(IN_FLIGHT, len(buckets))
        self._sizes = [max(bucket.num_bytes for bucket in buckets[slot :: self._count]) for slot in range(self._count)]
        self._device = device
        self._buffers: dict[int, torch.Tensor] = {}

    def __getitem__(self, bucket: Bucket) -> torch.Tensor:
        slot = bucket.index % self._count
        if slot not in self._buffers:
            self._buffers[slot] = torch.empty(self._sizes[slot], dtype=torch.uint8, device=self._device)
        return self._buffers[slot][: bucket.num_bytes]
