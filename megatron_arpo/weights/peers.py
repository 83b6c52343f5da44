"""Processes that are called together: the actor's ranks, or the engines. run/placement.py has them on Ray, the benches without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Peers(Protocol):
    def start(self, method: str, *arguments: Any, each: Sequence[Any] = ()) -> Callable[[], list[Any]]:
        """Calls `method` on all of them, with `each[i]` as one more argument for peer i where it is given. The returned function
        waits and gives their results in order, or raises the first error."""
        ...


def call(peers: Peers, method: str, *arguments: Any, each: Sequence[Any] = ()) -> list[Any]:
    return peers.start(method, *arguments, each=each)()
