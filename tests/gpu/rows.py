"""The rows of the GPU checks: written one by one as they are found, and shown as one table and one JSON file in the end.

Run as `python -m tests.gpu.rows ROWS.jsonl OUT.json`: prints the table, writes the JSON, exits with 1 where a check failed.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

HEADINGS = ("check", "value", "bound", "verdict", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`verdict` is pass, FAIL, measured (no bound), not installed, skipped, or dry run (a figure of the card, taken without one).

    Example: Row(name="FP8 over bf16, step time", value=0.71, bound="<= 0.8", verdict="pass", note="")
    """

    name: str
    value: float | None
    bound: str
    verdict: str
    note: str


@dataclass(slots=True)
class Recorder:
    """Appends rows to `path`; `failed` are the names of those outside of their bounds."""

    path: Path
    dry_run: bool
    failed: list[str] = field(default_factory=list)

    def __call__(
        self,
        name: str,
        value: float,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        of_card: bool = False,
        note: str = "",
    ) -> None:
        """One figure. `of_card` ones say something about the card alone and are not judged in a dry run."""
        verdict = verdict_of(value, at_most, at_least, unjudged=of_card and self.dry_run)
        bound = "" if at_most is at_least is None else f"<= {at_most:g}" if at_most is not None else f">= {at_least:g}"
        self._add(Row(name=name, value=value, bound=bound, verdict=verdict, note=note))
        if verdict == "FAIL":
            self.failed.append(name)

    def not_installed(self, name: str, reason: str) -> None:
        self._add(Row(name=name, value=None, bound="", verdict="not installed", note=reason))

    def skipped(self, name: str, reason: str) -> None:
        self._add(Row(name=name, value=None, bound="", verdict="skipped", note=reason))

    def broken(self, name: str, reason: str) -> None:
        self._add(Row(name=name, value=None, bound="", verdict="FAIL", note=reason))

    def _add(self, row: Row) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def verdict_of(value: float, at_most: float | None, at_least: float | None, unjudged: bool) -> str:
    if unjudged:
        return "dry run"
    if at_most is at_least is None:
        return "measured"
    inside = math.isfinite(value) and (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
    return "pass" if inside else "FAIL"


def read_rows(path: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def table(rows: list[Row]) -> str:
    cells = [HEADINGS, *((row.name, "" if row.value is None else f"{row.value:.4g}", row.bound, row.verdict, row.note) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    widths[-1] = 0
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells)


def main() -> int:
    found, out = Path(sys.argv[1]), Path(sys.argv[2])
    rows = read_rows(found)
    from megatron_arpo.bench.report import describe_machine

    machine = describe_machine()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(table(rows))
    out.write_text(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8")
    failed = [row.name for row in rows if row.verdict == "FAIL"]
    print(f"{len(rows)} rows, {len(failed)} failed; written to {out}")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
