"""An engine's side of a weight sync without an engine: workers that keep tensors of the shapes an engine keeps, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_arpo.engine.slices import kept_region
from megatron_arpo.engine.transport.base import Connection
from megatron_arpo.engine.weight_receiver import WeightReceiver
from megatron_arpo.weights.peers import Peers


class PlainWorker:
    """Tensor-parallel rank `rank` of an engine, on `device`."""

    def __init__(self, rank: int, device: str) -> None:
        self._rank, self._device = rank, torch.device(device)
        self._receiver: WeightReceiver | None = None
        self._version = 0
        self.tensors: dict[str, torch.Tensor] = {}
        """What is kept of each Hugging Face tensor."""

    def weight_version(self) -> int:
        return self._version

    def connect_weights(self, connection: Connection) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._num_kv_heads, self._tp = connection.num_kv_heads, len(connection.mailboxes)
        self._receiver = WeightReceiver(connection, self._rank, self._device)

    def receive_buckets(self, version: int, indices: Sequence[int]) -> None:
        for index in indices:
            self._receiver.receive(version, index)

    def check_buckets(self, version: int, checksums: Mapping[int, Sequence[str]]) -> None:
        for index, of_bucket in checksums.items():
            self._receiver.check(version, index, of_bucket)

    def begin_weights(self, in_flight: str) -> None:
        """Nothing is in flight."""

    def load_buckets(self, version: int, indices: Sequence[int]) -> None:
        for index in indices:
            for name, tensor in self._receiver.tensors(version, index):
                part = kept_region(name, tuple(tensor.shape), self._num_kv_heads, self._tp, self._rank).of(tensor)
                if name not in self.tensors:
                    self.tensors[name] = torch.zeros(part.shape, dtype=part.dtype, device=self._device)
                self.tensors[name].copy_(part)
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def commit_weights(self, version: int) -> None:
        self._receiver.check_complete(version)
        self._version = version

    def abandon_weights(self) -> None:
        """Nothing is held."""

    def kept_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def disconnect_weights(self) -> None:
        self._receiver.close()
        self._receiver = None

    def kept(self) -> dict[str, torch.Tensor]:
        return self.tensors


class PlainEngines:
    """Engines of `tp` workers each, as peers: workers of engine e are peers e * tp and on."""

    def __init__(self, workers: Peers, num_engines: int, tp: int) -> None:
        self._workers, self._num_engines, self._tp = workers, num_engines, tp

    def start(self, method: str, *arguments: Any, each: Sequence[Any] = ()) -> Callable[[], list[Any]]:
        of_workers = [one for one in each for _ in range(self._tp)]
        wait = self._workers.start(method, *arguments, each=of_workers)
        return lambda: wait()[:: self._tp]
