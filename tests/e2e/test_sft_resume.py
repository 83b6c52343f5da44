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
    """Killed, started again, interrupted, started again."""
    for checkpoint, how in (("step_000005", signal.SIGKILL), ("step_000010", signal.SIGINT)):
        command = Command(*arguments(task, tmp_path))
        try:
            command.wait_until((tmp_path / "run/checkpoints" / checkpoint).exists, 180, checkpoint)
            if how is signal.SIGKILL:
                command.kill_hard()
            else:
                os.killpg(command.process.pid, how)  # as a terminal does, to the workers too
                assert command.finish() == 130
                assert "Traceback" not in command.output, command.output
            command.wait_until_nothing_is_left(90)
        finally:
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
