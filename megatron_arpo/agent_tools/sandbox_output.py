"""What a program wrote, read as it comes and bounded: the first bytes of stdout, the last bytes of stderr."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

READ_BYTES = 65536
FLOOD_FACTOR = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOutcome:
    """How a program ended. `exit_code` is negative for the signal that killed it. `ended` says who ended it: the
    program itself, its deadline, or its output, which outgrew the limit FLOOD_FACTOR times. `stdout_cut` tells that
    `stdout` is not all of it.

    Example: ProgramOutcome(stdout="5\\n", stderr="", exit_code=0, ended="itself", stdout_cut=False)
    """

    stdout: str
    stderr: str
    exit_code: int
    ended: Literal["itself", "deadline", "output"]
    stdout_cut: bool


class OutputReader:
    """Reads one pipe on the running event loop. Keeps `limit_bytes` of it, from its start or its end, drops the rest
    and calls `on_flood` once FLOOD_FACTOR times as much has come."""

    def __init__(self, file: int, limit_bytes: int, keep: Literal["start", "end"], on_flood: Callable[[], None]) -> None:
        self._file = file
        self._limit_bytes = limit_bytes
        self._keep = keep
        self._on_flood = on_flood
        self._kept = bytearray()
        self._num_bytes = 0
        os.set_blocking(file, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(file, self._read)

    @property
    def flooded(self) -> bool:
        return self._num_bytes > FLOOD_FACTOR * self._limit_bytes

    @property
    def cut(self) -> bool:
        return self._num_bytes > self._limit_bytes

    def finish(self) -> str:
        """Takes what is still in the pipe and closes it. Call it when no writer is left or nobody wants the rest."""
        if self._file >= 0:
            while not self.flooded and self._read():
                pass
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1
        return self._kept.decode("utf-8", "replace")

    def _read(self) -> bool:
        """Takes one piece; False where there is none."""
        try:
            piece = os.read(self._file, READ_BYTES)
        except BlockingIOError:
            return False
        if not piece:
            self._loop.remove_reader(self._file)
            return False
        was_flooded = self.flooded
        self._num_bytes += len(piece)
        self._kept += piece
        if self._keep == "start":
            del self._kept[self._limit_bytes :]
        else:
            del self._kept[: -self._limit_bytes]
        if self.flooded and not was_flooded:
            self._on_flood()
        return True
