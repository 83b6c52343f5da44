"""Adam's state in host memory: the losses are those of an optimizer on the device, and its checkpoints load.

In a process of its own, on a pretended device: see offload_on_pretended_device.py for what that shows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_offload.py runs it on the device")
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_offloaded_state(tmp_path: Path, fraction: float) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.offload_on_pretended_device", str(fraction), str(tmp_path)],
        cwd=ROOT, text=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["share on the host"] >= fraction and (fraction == 1.0 or found["share on the host"] < 1.0)
    assert found["losses"] < 1e-3 and found["learned"] < 0.95
    assert found["resumed"] == found["from the start"] == 0.0
    assert found["resumed on the device"] < 1e-3
