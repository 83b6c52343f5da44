"""Buckets in the actor ranks' own GPU memory, opened by the engine's workers of the same host: colocated actors and engines.

Each worker copies what it needs, over NVLink where the actor rank sits on another GPU. Tensors in shared host memory go the same way,
which is how this is tested without a GPU.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing

from megatron_arpo.engine.buckets import Bucket, Fragment
from megatron_arpo.engine.transport.base import IN_FLIGHT, CudaIpcRoute, Slots
from megatron_arpo.engine.transport.messages import pack


class CudaIpcOutbox:
    def __init__(self, buckets: Sequence[Bucket], rank: int, device: torch.device) -> None:
        self._messages = [pack(bucket, [one for one in bucket.fragments if one.actor == rank]) for bucket in buckets]
        largest = max(message.num_bytes for message in self._messages)
        self._buffers = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(IN_FLIGHT)]
        if device.type == "cpu":
            torch.multiprocessing.set_sharing_strategy("file_system")

    @property
    def handle(self) -> str:
        """What a worker opens these buffers with."""
        return base64.b64encode(bytes(ForkingPickler.dumps(self._buffers))).decode()

    def target(self, bucket: Bucket, fragment: Fragment) -> torch.Tensor:
        return self._messages[bucket.index].view(self._buffers[bucket.index % IN_FLIGHT], bucket, fragment)

    def send(self, bucket: Bucket) -> None:
        if self._buffers[0].is_cuda:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        self._buffers.clear()


class CudaIpcInbox:
    def __init__(self, route: CudaIpcRoute, buckets: Sequence[Bucket], mailbox: int, device: torch.device) -> None:
        self._remote = [pickle.loads(base64.b64decode(handle)) for handle in route.handles]
        self._mailbox = mailbox
        self._messages = [
            [pack(bucket, [one for one in bucket.fragments if one.actor == rank]) for rank in range(len(self._remote))]
            for bucket in buckets
        ]
        self._slots = Slots(buckets, staged=False, device=device)

    def receive(self, bucket: Bucket) -> None:
        into = self._slots[bucket]
        for buffers, message in zip(self._remote, self._messages[bucket.index], strict=True):
            for fragment in message.fragments:
                if self._mailbox in fragment.mailboxes:
                    sent = message.view(buffers[bucket.index % IN_FLIGHT], bucket, fragment)
                    bucket.fragment_view(into, fragment).copy_(sent)
        if into.is_cuda:
            torch.cuda.current_stream().synchronize()

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        return self._slots[bucket]

    def close(self) -> None:
        self._remote.clear()
