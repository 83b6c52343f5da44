"""Numbers of a run as JSON lines: one object a phase and step, never rewritten but when a run goes back to a checkpoint."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path


class MetricsFile:
    """Appends to metrics.jsonl rows {"phase": str, "step": int, "time": unix seconds, ...}.

    Phases: train, eval, eval_without_tools, sft, sft_data, sync, checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        row = {"phase": phase, "step": step, "time": round(time.time(), 3), **values}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def drop_after(self, step: int) -> None:
        """Forgets what was written after `step`; a line that a crash cut short goes too."""
        if not self._path.exists():
            return
        kept = [line for line in self._path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
        aside = self._path.with_suffix(".tmp")
        aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(aside, self._path)


def read_metrics(path: Path) -> list[dict]:
    """Rows in order. A last line that a crash cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return float("inf")
