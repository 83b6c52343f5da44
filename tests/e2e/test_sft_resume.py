"""Fine-tuning that is killed or interrupted goes on with the batches it would have had, and leaves no loader's worker behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megatron_arpo.observe.metrics import read_metrics
from tests.e2e.commands import ROOT, Command, run

pytestmark = pytest.mark.slow


def arguments(task: Path, folder: Path, loader: str = "torch") -> list[str]:
    """16 updates on the first 512 demonstrations."""
    some = task / "some.jsonl"
    if not some.exists():
        some.write_text("".join((task / "demonstrations.jsonl").read_text().splitlines(keepends=True)[:512]))
    return [
        "sft", str(ROOT / "examples/quickstart/sft.yaml"), f"run.dir={folder}/run", f"model.path={task}/model", "actor.layout.dp=1",
        f"sft.demonstrations={some}", "sft.num_epochs=1", "sft.batch_size=32", "run.save_every_steps=5",
        f"sft.loader={loader}",
    ]  # fmt: skip


def weights(folder: Path) -> bytes:
    return (folder / "run/hf/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    code, output = run(*arguments(task, folder))
    assert code == 0, output
    return folder


def test_stopped_and_started_again(task: Path, undisturbed: Path, tmp_path: Path) -> None:
    """Killed, started again beside what is still dying, interrupted, started again."""
    killed, interrupted = Command(*arguments(task, tmp_path)), None
    try:
        killed.wait_until((tmp_path / "run/checkpoints/step_000005").exists, 180, "checkpoint")
        killed.kill_hard()
        interrupted = Command(*arguments(task, tmp_path))
        interrupted.wait_until((tmp_path / "run/checkpoints/step_000010").exists, 180, "checkpoint")
        os.killpg(interrupted.process.pid, signal.SIGINT)  # as a terminal does, to the workers too
        assert interrupted.finish() == 130
        assert "Traceback" not in interrupted.output, interrupted.output
        interrupted.wait_until_nothing_is_left(90)
        killed.wait_until_nothing_is_left(90)
    finally:
        for command in filter(None, (killed, interrupted)):
            command.sweep()
    code, output = run(*arguments(task, tmp_path))
    assert code == 0, output
    assert "resuming from" in output
    assert weights(tmp_path) == weights(undisturbed)
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows if row["phase"] == "sft"] == list(range(1, 17))
    (found,) = [row for row in rows if row["phase"] == "sft_data"]
    assert found["rows"] == found["sequences"] == 512 and found["rows_too_long"] == 0


def test_dali_trains_the_same_weights(task: Path, undisturbed: Path, tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali")
    code, output = run(*arguments(task, tmp_path, "dali"))
    assert code == 0, output
    assert weights(tmp_path) == weights(undisturbed)
