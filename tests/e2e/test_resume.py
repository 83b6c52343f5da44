"""A run that is killed goes on from its last checkpoint; on recorded rollouts its weights are those of a run never killed."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
import yaml

from megatron_arpo.observe.metrics import read_metrics
from megatron_arpo.rollout.record import write_step
from tests.e2e.commands import Command, run, small_disk
from tests.unit.trees import random_tree

pytestmark = pytest.mark.slow
NUM_STEPS = 6


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts of NUM_STEPS steps; one step has no gradient at all."""
    folder = tmp_path_factory.mktemp("recorded") / "rollouts"
    folder.mkdir()
    for step in range(1, NUM_STEPS + 1):
        trees = [random_tree(100 * step + index, prompt_id=f"{step}-{index}") for index in range(4)]
        write_step(folder / f"step_{step:06d}.jsonl", trees)
    return folder


def config_file(task: Path, recorded: Path, folder: Path, **layout: int) -> Path:
    config = {
        "run": {"dir": str(folder / "run"), "num_steps": NUM_STEPS, "save_every_steps": 2, "replay": str(recorded)},
        "model": {"path": str(task / "model"), "dtype": "float32"},
        "data": {"train": str(task / "train.parquet"), "max_prompt_tokens": 128},
        "rollout": {"prompts_per_step": 4, "max_response_tokens": 64},
        "actor": {
            "mini_batch_prompts": 2, "max_row_tokens": 256, "layout": layout,
            "optimizer": {"lr": 1e-3, "schedule": "linear", "warmup_updates": 3},
        },
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def weights(folder: Path) -> bytes:
    return (folder / "run/hf/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(task: Path, recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    code, output = run("train", str(config_file(task, recorded, folder, tp=2)))
    assert code == 0, output
    return folder


def test_the_run_folder_is_complete(undisturbed: Path) -> None:
    found = undisturbed / "run"
    assert yaml.safe_load((found / "config.yaml").read_text())["actor"]["layout"]["tp"] == 2
    assert [row["step"] for row in read_metrics(found / "metrics.jsonl") if row["phase"] == "train"] == list(range(1, NUM_STEPS + 1))
    assert sorted(one.name for one in (found / "rollouts").iterdir()) == [f"step_{s:06d}.jsonl" for s in range(1, NUM_STEPS + 1)]
    assert sorted(one.name for one in (found / "checkpoints").iterdir()) == ["step_000004", "step_000006"]
    assert (found / "hf/config.json").exists() and (found / "hf/tokenizer.json").exists()


def test_killed_at_random_moments(task: Path, recorded: Path, undisturbed: Path, tmp_path: Path) -> None:
    """SIGKILL while it starts, around the first checkpoint, and at random moments behind the first and the second; each time the same
    command is started again at once, beside what is still dying of the one before."""
    path = config_file(task, recorded, tmp_path, tp=2)
    draw = random.Random(7)
    metrics, checkpoints = tmp_path / "run/metrics.jsonl", tmp_path / "run/checkpoints"
    moments = {
        "a lock": lambda: (tmp_path / "run/.lock").exists(),
        "a finished step": lambda: metrics.exists() and metrics.stat().st_size > 0,
        "the first checkpoint": lambda: (checkpoints / "step_000002").exists(),
        "the second checkpoint": lambda: (checkpoints / "step_000004").exists(),
    }
    killed = []
    try:
        for what, reached in moments.items():
            killed.append(Command("train", str(path)))
            killed[-1].wait_until(reached, 120, what)
            time.sleep(draw.random())
            killed[-1].kill_hard()
        code, output = run("train", str(path))
        assert code == 0, output
        assert "resuming from" in output
        for command in killed:
            command.wait_until_nothing_is_left(90)
    finally:
        for command in killed:
            command.sweep()
    assert weights(tmp_path) == weights(undisturbed)
    rows = [row for row in read_metrics(metrics) if row["phase"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1)), "no step twice, none lost"


def test_a_replay_that_is_too_short_is_refused(task: Path, recorded: Path, tmp_path: Path) -> None:
    code, output = run("train", str(config_file(task, recorded, tmp_path, tp=1)), "run.num_steps=9")
    assert code == 2 and "step_000007.jsonl is missing; lower run.num_steps to 6" in output


def test_a_finished_run_started_again_changes_nothing(task: Path, recorded: Path, undisturbed: Path) -> None:
    checkpoint = undisturbed / "run/checkpoints/step_000006/state.json"
    before, written = weights(undisturbed), checkpoint.stat().st_mtime_ns
    code, output = run("train", str(config_file(task, recorded, undisturbed, tp=2)))
    assert code == 0, output
    assert weights(undisturbed) == before and checkpoint.stat().st_mtime_ns == written


def test_a_checkpoint_goes_on_in_another_layout(task: Path, recorded: Path, undisturbed: Path, tmp_path: Path) -> None:
    import shutil

    import torch
    from safetensors.torch import load_file

    (tmp_path / "run/checkpoints").mkdir(parents=True)
    shutil.copytree(undisturbed / "run/checkpoints/step_000004", tmp_path / "run/checkpoints/step_000004")
    code, output = run("train", str(config_file(task, recorded, tmp_path, pp=2)))
    assert code == 0, output
    ours, theirs = (load_file(folder / "run/hf/model.safetensors") for folder in (tmp_path, undisturbed))
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, atol=2e-4), name


def test_convert_gives_the_weights_of_the_checkpoint(undisturbed: Path, tmp_path: Path) -> None:
    code, output = run("convert", "to-hf", str(undisturbed / "run"), str(tmp_path / "hf"))
    assert code == 0, output
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported, ours = load_file(undisturbed / "run/hf/model.safetensors"), load_file(tmp_path / "hf/model.safetensors")
    assert exported.keys() == ours.keys() and all((exported[name] == ours[name]).all() for name in ours)
    code, output = run("convert", "verify", str(undisturbed / "run"), str(undisturbed / "run/hf"))
    assert code == 0 and "not: Megatron dist-checkpoint" in output, output
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").decode([5]) and model.num_parameters() > 1_000_000
    code, output = run("convert", "to-hf", str(undisturbed / "run"), str(tmp_path / "hf"))
    assert code == 2 and "already there" in output


def test_a_full_disk_leaves_the_previous_checkpoint_whole(task: Path, recorded: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 24) as small:
        code, output = run("train", str(config_file(task, recorded, small, tp=2)))
        assert code == 2, output
        assert "the disk is full" in output and "older checkpoints are whole" in output and "Traceback" not in output
        left = sorted(one.name for one in (small / "run/checkpoints").iterdir())
        assert left == ["step_000002"]
        assert json.loads((small / "run/checkpoints/step_000002/state.json").read_text())["state"]["step"] == 2
        code, output = run("convert", "to-hf", str(small / "run"), str(tmp_path / "hf"))
        assert code == 0, output
