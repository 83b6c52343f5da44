"""`bench data` ends in time, and reports the named ratio of two loaders whose batches it has compared."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.e2e.commands import run

pytestmark = pytest.mark.slow
HAS_DALI = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None


@pytest.mark.skipif(not HAS_DALI, reason="NVIDIA DALI is not installed")
def test_quick(tmp_path: Path) -> None:
    code, output = run("bench", "data", "--quick", "--json", str(tmp_path / "report.json"), timeout_s=120)
    assert code == 0, output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ratios"]["dali_over_torch"] > 0 and report["spreads"]["dali_over_torch"][2] == 5
    assert [(row["loader"], row["workers"]) for row in report["rows"]] == [("torch", 1), ("dali", 1), ("torch", 0), ("dali", 0)]


@pytest.mark.skipif(HAS_DALI, reason="NVIDIA DALI is installed")
def test_without_dali() -> None:
    code, output = run("bench", "data", "--quick")
    assert code == 2 and "pip install -e '.[dali]'" in output and "Traceback" not in output
