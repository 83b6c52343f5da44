"""The two sides of a weight sync, small: actor ranks that hold rows of given tensors and send them through real transports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_arpo.engine.base import Engine
from megatron_arpo.engine.buckets import buckets_of, checksum
from megatron_arpo.engine.transport.base import CudaIpcRoute, Route
from megatron_arpo.engine.transport.open import open_outbox
from megatron_arpo.types import Region
from megatron_arpo.weights.plan import HeldPiece, fragments_of


class RowActor:
    """Actor rank `rank` of `num_ranks`: of each tensor it holds its share of the rows, the last rank what is left over."""

    def __init__(self, rank: int, num_ranks: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._outboxes: dict[str, Any] = {}
        self.change(tensors)

    def change(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._parts: dict[str, tuple[tuple[int, ...], Region, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            share = tensor.shape[0] // self._num_ranks
            first = self._rank * share
            count = tensor.shape[0] - first if self._rank == self._num_ranks - 1 else share
            region = Region((first, *(0 for _ in tensor.shape[1:])), (count, *tensor.shape[1:]))
            self._parts[name] = (tuple(tensor.shape), region, region.of(tensor).clone())

    def held_weights(self, fp8: bool) -> list[HeldPiece]:
        return [
            HeldPiece(name=name, dtype=str(part.dtype).removeprefix("torch."), shape=shape, region=region)
            for name, (shape, region, part) in self._parts.items()
        ]

    def sync_store(self) -> tuple[str, int] | None:
        if self._rank:
            return None
        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return "127.0.0.1", self._store.port

    def open_outbox(self, name: str, route: Route, buckets: list[dict[str, Any]]) -> str | None:
        self.close_outbox(name)
        made = buckets_of(buckets)
        outbox = open_outbox(route, made, self._rank, torch.device("cpu"))
        self._outboxes[name] = (outbox, made)
        return outbox.handle if isinstance(route, CudaIpcRoute) else None

    def send_bucket(self, name: str, index: int, with_checksums: bool) -> list[str]:
        outbox, buckets = self._outboxes[name]
        bucket, found = buckets[index], []
        for fragment in fragments_of(bucket, self._rank):
            _, region, part = self._parts[bucket.places[fragment.tensor].name]
            target = outbox.target(bucket, fragment)
            target.copy_(fragment.region.within(region).of(part))
            if with_checksums:
                found.append(checksum(target))
        outbox.send(bucket)
        return found

    def close_outbox(self, name: str) -> None:
        if name in self._outboxes:
            self._outboxes.pop(name)[0].close()

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        return [[-1.0] * (len(ids) - 1) for ids in sequences] if self._rank == 0 else []


class EnginePeers:
    """Engines that live in a running event loop, as peers of a driver in another thread."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines, self._loop = engines, asyncio.get_running_loop()

    def start(self, method: str, *arguments: Any, each: Sequence[Any] = ()) -> Callable[[], list[Any]]:
        if method == "weight_version":
            return lambda: [engine.weight_version for engine in self._engines]
        own = [(one,) for one in each] or [()] * len(self._engines)
        calls = [
            asyncio.run_coroutine_threadsafe(self._call(engine, method, *arguments, *one), self._loop)
            for engine, one in zip(self._engines, own, strict=True)
        ]
        return lambda: [call.result(timeout=60) for call in calls]

    async def _call(self, engine: Engine, method: str, *arguments: Any) -> Any:
        if method == "score":
            return [await engine.score(ids) for ids in arguments[0]]
        return await getattr(engine, method)(*arguments)
