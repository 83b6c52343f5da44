"""From a route to its two ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_arpo.engine.buckets import Bucket
from megatron_arpo.engine.transport.base import BroadcastRoute, CudaIpcRoute, FilesRoute, Inbox, Outbox, Route


def open_outbox(route: Route, buckets: Sequence[Bucket], rank: int, device: torch.device) -> Outbox:
    """For actor rank `rank`. Waits for the engine's side with a broadcast route."""
    match route:
        case FilesRoute():
            from megatron_arpo.engine.transport.files import FilesOutbox

            return FilesOutbox(route)
        case BroadcastRoute():
            from megatron_arpo.engine.transport.broadcast import BroadcastOutbox

            return BroadcastOutbox(route, buckets, rank, device)
        case CudaIpcRoute():
            from megatron_arpo.engine.transport.cuda_ipc import CudaIpcOutbox

            return CudaIpcOutbox(buckets, rank, device)


def open_inbox(route: Route, buckets: Sequence[Bucket], mailbox: int, device: torch.device) -> Inbox:
    """For the engine worker that reads `mailbox`."""
    match route:
        case FilesRoute():
            from megatron_arpo.engine.transport.files import FilesInbox

            return FilesInbox(route)
        case BroadcastRoute():
            from megatron_arpo.engine.transport.broadcast import BroadcastInbox

            return BroadcastInbox(route, buckets, mailbox, device)
        case CudaIpcRoute():
            from megatron_arpo.engine.transport.cuda_ipc import CudaIpcInbox

            return CudaIpcInbox(route, buckets, mailbox, device)
