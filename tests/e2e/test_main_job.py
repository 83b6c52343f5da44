"""The main job with everything real: Megatron actors, vLLM, sandboxed Python, search, rewards, weight sync, checkpoint, export."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml

from megatron_arpo.observe.metrics import read_metrics
from megatron_arpo.rollout.record import read_step
from tests.e2e.commands import PUBLISHED_DATA, ROOT, Command, run

pytestmark = pytest.mark.slow


def settings(task: Path, folder: Path) -> tuple[str, ...]:
    """The quickstart's own configuration, shortened."""
    return (
        str(ROOT / "examples/quickstart/train.yaml"),
        f"run.dir={folder}/run",
        f"model.path={task}/model",
        f"data.train={task}/train.parquet",
        f"data.valid={task}/valid.parquet",
        "run.num_steps=2",
        "rollout.prompts_per_step=4",
        "rollout.max_response_tokens=80",
        "actor.mini_batch_prompts=2",
        "eval.every_steps=0",
    )


@pytest.fixture(scope="module")
def fine_tuned(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One epoch of SFT: enough for the turn format and tool calls, though not for right answers."""
    folder = tmp_path_factory.mktemp("sft")
    code, output = run(
        "sft", str(ROOT / "examples/quickstart/sft.yaml"), f"run.dir={folder}/run", f"model.path={task}/model",
        f"sft.demonstrations={task}/demonstrations.jsonl", "sft.num_epochs=1",
    )  # fmt: skip
    assert code == 0, output
    assert "4096 demonstrations" in output and "in the loss" in output
    rows = [row for row in read_metrics(folder / "run/metrics.jsonl") if row["phase"] == "sft"]
    assert len(rows) == 4096 // 32 and rows[-1]["loss"] < rows[0]["loss"] - 3
    return folder / "run/hf"


@pytest.mark.parametrize(
    ("layout", "loss"),
    [
        ({"tp": 2}, {}),
        ({"dp": 2}, {}),
        ({"cp": 2}, {"kl_coef": 0.01, "entropy_advantage": 0.2, "aepo_clipping": True}),
        ({"pp": 2, "vpp": 2}, {"aggregation": "seq-mean-token-mean"}),
    ],
    ids=["tp2", "dp2", "cp2, KL and AEPO", "vpp2"],
)
def test_train(task: Path, fine_tuned: Path, tmp_path: Path, layout: dict, loss: dict) -> None:
    overrides = [f"model.path={fine_tuned}", f"actor.layout={json.dumps(layout)}", f"algorithm.loss={json.dumps(loss)}"]
    code, output = run("train", *settings(task, tmp_path), *overrides)
    assert code == 0, output
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    train = [row for row in rows if row["phase"] == "train"]
    assert [row["step"] for row in train] == [1, 2]
    syncs = [row for row in rows if row["phase"] == "sync"]
    assert len(syncs) == 1 + sum(row.get("actor/updates", 0) > 0 for row in train)
    assert all(row["logprob_diff_max"] < 1e-3 for row in syncs)
    assert [row["version"] for row in syncs] == list(range(len(syncs)))
    assert {row["phase"] for row in rows} >= {"eval", "eval_without_tools"}
    for step in (1, 2):
        trees = read_step(tmp_path / f"run/rollouts/step_{step:06d}.jsonl")
        assert len(trees) == 4
        for tree in trees:
            assert len(tree.leaf_ids) == 8 == len(tree.rewards)
            versions = {run.version for segment in tree.model_segments() for run in segment.weight_versions}
            assert versions == {0 if step == 1 else int("actor/updates" in train[0])}
        assert any(segment.tool_result.status == "ok" for tree in trees for segment in tree.segments if segment.kind == "tool")
        assert any(segment.decision for tree in trees for segment in tree.model_segments())
    assert syncs[-1]["version"] > 0, "some group must have had a gradient"
    assert (tmp_path / "run/hf/model.safetensors").read_bytes() != (fine_tuned / "model.safetensors").read_bytes()
    assert all(row["actor/mismatch_max"] < 1e-3 for row in train if "actor/mismatch_max" in row), "engine and actor are one policy"


@pytest.mark.skipif(not (PUBLISHED_DATA / "train_10k.parquet").exists(), reason="the published data is not here")
def test_two_steps_on_the_published_data(task: Path, tmp_path: Path) -> None:
    code, output = run(
        "train", str(ROOT / "examples/reasoning_cpu.yaml"), f"run.dir={tmp_path}/run", f"model.path={task}/model",
        ARPO_DATA=str(PUBLISHED_DATA),
    )  # fmt: skip
    assert code == 0, output
    assert "10000 prompts" in output and "broken escapes repaired in 10000" in output
    assert "prompts dropped, longer than data.max_prompt_tokens" in output
    rows = [row for row in read_metrics(tmp_path / "run/metrics.jsonl") if row["phase"] == "train"]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["reward_mean"] == -1.0 and rows[0]["groups_equal"] == 4, "nonsense is scored as nonsense"
    assert "no gradient and no update" in output
    trees = read_step(tmp_path / "run/rollouts/step_000001.jsonl")
    system = trees[0].prompt.messages[0]["content"]
    assert "wikipedia search tool" in system and "\\boxed{" in system and "\x08" not in system


def test_eval_of_an_exported_model(task: Path, fine_tuned: Path, tmp_path: Path) -> None:
    code, output = run("eval", *settings(task, tmp_path), f"model.path={fine_tuned}", "eval.num_prompts=8")
    assert code == 0, output
    code, output = run("eval", *settings(task, tmp_path), f"model.path={fine_tuned}", f"run.dir={fine_tuned.parent}")
    assert code == 2 and "holds a training run" in output
    code, output = run("train", *settings(task, tmp_path), f"model.path={fine_tuned}", f"run.dir={fine_tuned.parent}")
    assert code == 2 and "holds a run of 'sft', not of 'train'" in output
    (row, bare) = read_metrics(tmp_path / "run/metrics.jsonl")
    assert row["num_prompts"] == 8 and -1.0 <= row["reward"] <= 1.1
    assert bare["phase"] == "eval_without_tools" and bare["tool_calls"] == 0


@pytest.mark.parametrize(
    ("moment", "pressed_in"),
    [("training 1/", "terminal"), ("train: ", "terminal"), ("train: ", "background")],
    ids=["while training", "while starting", "in the background"],
)
def test_ctrl_c(task: Path, fine_tuned: Path, tmp_path: Path, moment: str, pressed_in: str) -> None:
    """Ends within 10 s and leaves no process, no shared memory and no half checkpoint.

    A terminal sends SIGINT to every process of the group; a script's background job is started deaf to it and gets it alone.
    """
    shared = {one.name for one in Path("/dev/shm").iterdir()}
    overrides = (f"model.path={fine_tuned}", "run.num_steps=1000")
    command = Command("train", *settings(task, tmp_path), *overrides, deaf_to_sigint=pressed_in == "background")
    try:
        command.wait_for(moment)
        time.sleep(1.0)
        pressed = time.monotonic()
        if pressed_in == "terminal":
            os.killpg(command.process.pid, signal.SIGINT)
        else:
            command.process.send_signal(signal.SIGINT)
        assert command.finish(timeout_s=20) == 130, command.output
        assert time.monotonic() - pressed < 10.0
        assert "interrupted" in command.output and "Traceback" not in command.output
        command.wait_until_nothing_is_left(10.0 - (time.monotonic() - pressed))
    finally:
        command.sweep()
    assert {one.name for one in Path("/dev/shm").iterdir()} <= shared
    assert not list((tmp_path / "run").glob("checkpoints/.*"))


def test_every_example_is_a_valid_configuration(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_arpo.config.load import dump_config, load_config

    found = sorted((ROOT / "examples").rglob("*.yaml"))
    assert len(found) >= 3
    for path in found:
        config = load_config(path)
        again = tmp_path / path.name
        again.write_text(dump_config(config))
        assert load_config(again) == config
        assert yaml.safe_load(again.read_text())["run"]["num_steps"] == config.run.num_steps
