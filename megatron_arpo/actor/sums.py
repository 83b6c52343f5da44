"""What an optimizer update reports, added up over micro-batches and data-parallel ranks. Needs no torch, so that the driver needs none."""

from __future__ import annotations

from collections.abc import Sequence

Sums = dict[str, float]
"""Sums over targets; names ending in `_max` are maxima instead."""


def add_up(reports: Sequence[Sums]) -> Sums:
    """One report from those of several micro-batches, ranks or updates; empty ones, from ranks that don't report, are left out.

    Example: add_up([{"tokens": 2.0, "lr_max": 0.1}, {}, {"tokens": 3.0, "lr_max": 0.2}]) == {"tokens": 5.0, "lr_max": 0.2}
    """
    total: Sums = {}
    for report in reports:
        for name, value in report.items():
            total[name] = max(total.get(name, value), value) if name.endswith("_max") else total.get(name, 0.0) + value
    return total
