"""tools/gpu_check.sh in a dry run: every check's code runs on CPU at toy sizes, and the table and the JSON come out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.commands import ROOT

CHECKS = (
    "tree attention, float32", "tree attention, bfloat16", "optimizer offload", "local layers in float32", "tree batch over flat batch",
    "bf16 matrix products", "bf16 update of a 7B model's layers", "target log-probs", "target gradient", "target log-probs, peak memory",
    "local layers over themselves", "local over Transformer Engine", "FP8 blockwise over bf16", "reasoning: time_tree_over_flat",
    "reasoning: memory_tree_over_flat", "weights through CUDA IPC",
)  # fmt: skip


def gpu_check(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "2"}
    command = [str(ROOT / "tools/gpu_check.sh"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=500)


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    done = gpu_check("--dry-run", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert all(any(row["name"].startswith(check) for row in rows) for check in CHECKS)
    assert {row["verdict"] for row in rows} <= {"pass", "dry run", "not installed", "skipped"}
    assert f"{len(rows)} rows, 0 failed" in done.stdout
    if not torch.cuda.is_available():
        assert [row["verdict"] for row in rows if row["name"].startswith("FP8")] == ["not installed"] * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a card it runs")
def test_without_a_card_it_says_so() -> None:
    done = gpu_check("speed")
    assert done.returncode == 2 and "PyTorch sees no CUDA device; --dry-run" in done.stderr


def test_an_unknown_option() -> None:
    done = gpu_check("--wheel", "x")
    assert done.returncode == 2 and "unknown option --wheel" in done.stderr


@pytest.mark.slow
def test_a_process_that_ends_early_is_a_failed_row(tmp_path: Path) -> None:
    done = gpu_check("--dry-run", "--json", str(tmp_path / "found.json"), "no_such_check")
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert done.returncode == 1 and row["verdict"] == "FAIL" and "no_such_check" in row["name"]
