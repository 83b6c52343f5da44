"""Peers (weights/peers.py) without Ray: objects called together in threads of this process or in processes of their own."""

from __future__ import annotations

import multiprocessing
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from typing import Any


class ThreadPeers:
    def __init__(self, objects: Sequence[Any]) -> None:
        self.objects = list(objects)
        self._threads = [ThreadPoolExecutor(max_workers=1) for _ in objects]  # one each: calls come in order

    def start(self, method: str, *arguments: Any, each: Sequence[Any] = ()) -> Callable[[], list[Any]]:
        calls = [
            thread.submit(getattr(one, method), *arguments, *own)
            for one, thread, own in zip(self.objects, self._threads, _own(each, len(self.objects)), strict=True)
        ]
        return lambda: [call.result() for call in calls]

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


class ProcessPeers:
    """`make[i]()` runs in process i, forked from a server that has imported `preload`. `with ProcessPeers(...) as peers` ends them."""

    def __init__(self, make: Sequence[Callable[[], Any]], preload: Sequence[str] = ("megatron_arpo.engine.weight_receiver",)) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        self._ends = [context.Pipe() for _ in make]
        self.processes = [
            context.Process(target=_serve, args=(one, theirs), daemon=True) for one, (_, theirs) in zip(make, self._ends, strict=True)
        ]
        for process, (_, theirs) in zip(self.processes, self._ends, strict=True):
            process.start()
            theirs.close()  # so that a dead process is seen as an end of file
        self._waiting: deque[_Calls] = deque()

    def start(self, method: str, *arguments: Any, each: Sequence[Any] = ()) -> Callable[[], list[Any]]:
        for (ours, _), own in zip(self._ends, _own(each, len(self._ends)), strict=True):
            ours.send((method, (*arguments, *own)))
        calls = _Calls(self._ends)
        self._waiting.append(calls)

        def wait() -> list[Any]:
            while not calls.is_done:  # answers come in the order of the calls
                self._waiting.popleft().receive()
            return calls.results()

        return wait

    def __enter__(self) -> ProcessPeers:
        return self

    def __exit__(self, *_error: object) -> None:
        for ours, _ in self._ends:
            ours.close()
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


class _Calls:
    def __init__(self, ends: Sequence[tuple[Pipe, Pipe]]) -> None:
        self._ends = ends
        self._answers: list[tuple[Any, BaseException | None]] = []
        self.is_done = False

    def receive(self) -> None:
        for ours, _ in self._ends:
            try:
                self._answers.append(ours.recv())
            except (EOFError, OSError):
                self._answers.append((None, RuntimeError("a process ended in the middle of a call")))
        self.is_done = True

    def results(self) -> list[Any]:
        for _, error in self._answers:
            if error is not None:
                raise error
        return [value for value, _ in self._answers]


def _serve(make: Callable[[], Any], pipe: Pipe) -> None:
    served = make()
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((getattr(served, method)(*arguments), None))
        except Exception as error:  # the caller raises it
            error.add_note(traceback.format_exc())
            pipe.send((None, error))


def _own(each: Sequence[Any], count: int) -> list[tuple[Any, ...]]:
    return [(one,) for one in each] or [()] * count
