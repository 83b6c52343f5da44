"""Buckets broadcast over process groups: from each actor rank to the engine workers that need the same of it. gloo on CPU, NCCL on CUDA.

A group of its own joins an actor rank with each set of workers; actors' and engine's own groups are not touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroup, TCPStore

from megatron_arpo.engine.buckets import Bucket, Fragment
from megatron_arpo.engine.transport.base import BroadcastRoute, Slots
from megatron_arpo.engine.transport.messages import Message, pack

Line = tuple[int, tuple[int, ...]]
"""(actor rank, mailboxes) that share a group."""


def _lines(buckets: Sequence[Bucket]) -> list[Line]:
    """In the order in which every process makes its groups."""
    return list(dict.fromkeys((fragment.actor, fragment.mailboxes) for bucket in buckets for fragment in bucket.fragments))


def _messages(bucket: Bucket, lines: Sequence[Line]) -> Iterator[tuple[Line, Message]]:
    for line in lines:
        if fragments := [one for one in bucket.fragments if (one.actor, one.mailboxes) == line]:
            yield line, pack(bucket, fragments)


class _Groups:
    def __init__(
        self, route: BroadcastRoute, lines: Sequence[Line], everyone: Sequence[Line], device: torch.device, mine: int | None
    ) -> None:
        """`mine` is the mailbox of an engine's worker, None for an actor rank, which is first in all of its groups."""
        timeout = timedelta(seconds=route.timeout_s)
        store = TCPStore(route.host, route.port, is_master=False, timeout=timeout)
        self._groups: dict[Line, ProcessGroup] = {}
        for line in lines:
            rank = 0 if mine is None else 1 + line[1].index(mine)
            of_line = PrefixStore(f"{route.name}/{everyone.index(line)}", store)
            self._groups[line] = _make_group(of_line, rank, 1 + len(line[1]), device, timeout)

    def broadcast(self, line: Line, buffer: torch.Tensor) -> None:
        """From the actor rank to the mailboxes; returns when this side is done."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._groups[line].broadcast([buffer], options).wait()
        if buffer.is_cuda:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        self._groups.clear()


def _make_group(store: PrefixStore, rank: int, size: int, device: torch.device, timeout: timedelta) -> ProcessGroup:
    if device.type == "cuda":
        return torch.distributed.ProcessGroupNCCL(store, rank, size, timeout)
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)


class BroadcastOutbox:
    def __init__(self, route: BroadcastRoute, buckets: Sequence[Bucket], rank: int, device: torch.device) -> None:
        everyone = _lines(buckets)
        self._lines = [line for line in everyone if line[0] == rank]
        self._groups = _Groups(route, self._lines, everyone, device, mine=None)
        self._messages = [list(_messages(bucket, self._lines)) for bucket in buckets]
        largest = max((message.num_bytes for messages in self._messages for _, message in messages), default=0)
        self._buffers = {line: torch.empty(largest, dtype=torch.uint8, device=device) for line in self._lines}

    def target(self, bucket: Bucket, fragment: Fragment) -> torch.Tensor:
        line = (fragment.actor, fragment.mailboxes)
        message = next(message for found, message in self._messages[bucket.index] if found == line)
        return message.view(self._buffers[line], bucket, fragment)

    def send(self, bucket: Bucket) -> None:
        for line, message in self._messages[bucket.index]:
            self._groups.broadcast(line, self._buffers[line][: message.num_bytes])

    def close(self) -> None:
        self._groups.close()


class BroadcastInbox:
    def __init__(self, route: BroadcastRoute, buckets: Sequence[Bucket], mailbox: int, device: torch.device) -> None:
        everyone = _lines(buckets)
        self._lines = [line for line in everyone if mailbox in line[1]]
        self._groups = _Groups(route, self._lines, everyone, device, mine=mailbox)
        self._messages = [list(_messages(bucket, self._lines)) for bucket in buckets]
        largest = max((message.num_bytes for messages in self._messages for _, message in messages), default=0)
        self._message_buffer = torch.empty(largest, dtype=torch.uint8, device=device)
        self._slots = Slots(buckets, route.staged, torch.device("cpu") if route.staged else device)

    def receive(self, bucket: Bucket) -> None:
        into = self._slots[bucket]
        for line, message in self._messages[bucket.index]:
            received = self._message_buffer[: message.num_bytes]
            self._groups.broadcast(line, received)
            message.unpack(received, bucket, into)

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        return self._slots[bucket]

    def close(self) -> None:
        self._groups.close()
