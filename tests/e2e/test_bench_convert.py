"""`bench convert` ends in time, reports its named ratios, and leaves nothing on the disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.commands import run

pytestmark = pytest.mark.slow


def test_quick(tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    code, output = run("bench", "convert", "--quick", "--json", str(tmp_path / "report.json"), timeout_s=120, TMPDIR=str(folder))
    assert code == 0, output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ratios"]["speed_over_cp"] > 0 and report["spreads"]["speed_over_cp"][2] == 5
    largest = report["settings"]["largest tensor MB"] * 10**6
    assert report["ratios"]["peak_bytes_over_largest_tensor"] * largest < 2 * largest + (1 << 30)
    assert report["ratios"]["peak_of_largest_over_smallest_model"] < 1.05, "memory does not grow with the model"
    assert not list(folder.iterdir())
