"""What a person sees of a running command: progress bars on a terminal, plain lines in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_SECONDS_BETWEEN_LINES = 15.0


def say(text: str) -> None:
    """One line for the reader, above any progress bar."""
    if _active:
        _active[-1].print(text)
    else:
        print(text, flush=True)


class Progress:
    """Counts towards a total; `advance` takes what to show beside the bar."""

    def __init__(self, title: str, total: int, done: int) -> None:
        self._title, self._total, self._done = title, total, done
        self._last_line = 0.0
        self._bar = None
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
                TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
            )  # fmt: skip
            self._task = self._bar.add_task(title, total=total, completed=done, note="")
            self._bar.start()

    def advance(self, note: str = "") -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, note=note)
        elif self._done == self._total or time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            print(f"{self._title} {self._done}/{self._total}  {note}", flush=True)

    def note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, note=text)

    def print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()


_active: list[Progress] = []


@contextmanager
def progress(title: str, total: int, done: int = 0) -> Iterator[Progress]:
    bar = Progress(title, total, done)
    _active.append(bar)
    try:
        yield bar
    finally:
        _active.remove(bar)
        bar.stop()
