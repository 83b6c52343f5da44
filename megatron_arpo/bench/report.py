"""The one format of every bench: a table of what was measured and named ratios of two things measured in turn."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MIN_PAIRS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Median of a ratio over `num_pairs` pairs measured in turn, with the least and the greatest; a ratio of counts has one pair."""

    value: float
    low: float
    high: float
    num_pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """`rows` are what the table shows, one a measured thing, with the same keys; `ratios` are what versions are compared by."""

    bench: str
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    ratios: Mapping[str, Ratio]
    machine: Mapping[str, Any] = field(default_factory=lambda: describe_machine())


def describe_machine() -> dict[str, Any]:
    """What a reader needs to place the figures: processor, cores this process may use, accelerator, date."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    try:
        import torch
    except ImportError:
        return found
    found["torch"] = torch.__version__
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def seconds_of(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """ours / theirs, pair by pair, of measurements taken in turn. Raises ValueError for fewer than five pairs."""
    if len(ours) != len(theirs) or len(ours) < MIN_PAIRS:
        raise ValueError(f"a ratio needs at least {MIN_PAIRS} pairs, got {len(ours)} and {len(theirs)} measurements")
    values = [one / other for one, other in zip(ours, theirs, strict=True)]
    return Ratio(value=statistics.median(values), low=min(values), high=max(values), num_pairs=len(values))


def counted_ratio(ours: float, theirs: float) -> Ratio:
    """A ratio of two counts, which have no spread."""
    return Ratio(value=ours / theirs, low=ours / theirs, high=ours / theirs, num_pairs=1)


def show(report: BenchReport) -> None:
    """Prints settings, the table and the ratios."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if os.isatty(1) else 160)
    console.print(f"bench {report.bench}: " + ", ".join(f"{name} {value}" for name, value in report.machine.items()))
    console.print(", ".join(f"{name} {value}" for name, value in report.settings.items()))
    table = Table()
    for name in report.rows[0]:
        table.add_column(name, justify="left" if isinstance(report.rows[0][name], str) else "right")
    for row in report.rows:
        table.add_row(*(_shown(value) for value in row.values()))
    console.print(table)
    for name, ratio in report.ratios.items():
        spread = f"  ({ratio.low:.3f} to {ratio.high:.3f} over {ratio.num_pairs} pairs)" if ratio.num_pairs > 1 else ""
        console.print(f"{name} {ratio.value:.3f}{spread}", highlight=False)


def _shown(value: Any) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def write_json(report: BenchReport, path: Path) -> None:
    """{"bench", "machine", "settings", "rows", "ratios": {name: number}, "spreads": {name: [low, high, pairs]}}"""
    values = asdict(report)
    values["ratios"] = {name: ratio.value for name, ratio in report.ratios.items()}
    values["spreads"] = {name: [ratio.low, ratio.high, ratio.num_pairs] for name, ratio in report.ratios.items()}
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
