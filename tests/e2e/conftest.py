from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import ROOT


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model, prompts and demonstrations, small."""
    folder = tmp_path_factory.mktemp("quickstart") / "task"
    subprocess.run(
        [sys.executable, str(ROOT / "examples/quickstart/make_task.py"), "--out", str(folder), "--num-demonstrations", "4096",
         "--num-train", "64", "--num-valid", "16"],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder
