"""Wrong input: one clear sentence, exit code 2, within 3 s, and nothing half-written."""

from __future__ import annotations

import fcntl
import json
import time
from pathlib import Path

import pytest
import torch
import yaml

from tests.e2e.commands import run

SENTENCE_WITHIN_S = 3.0


@pytest.fixture
def config(task: Path, tmp_path: Path) -> dict:
    return {
        "run": {"dir": str(tmp_path / "run"), "num_steps": 2},
        "model": {"path": str(task / "model"), "dtype": "float32"},
        "data": {"train": str(task / "train.parquet"), "max_prompt_tokens": 128},
        "rollout": {"prompts_per_step": 4, "max_response_tokens": 64},
        "actor": {"mini_batch_prompts": 2},
        "algorithm": {"rollout": {"kind": "arpo", "num_rollouts": 4, "num_initial": 2}},
    }


def expect_refusal(config: dict, tmp_path: Path, *said: str, command: str = "train", overrides: tuple[str, ...] = ()) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    started = time.monotonic()
    code, output = run(command, str(path), *overrides)
    seconds = time.monotonic() - started
    assert code == 2, output
    assert "Traceback" not in output
    problem = [line for line in output.splitlines() if line.startswith("megatron-arpo: ")]
    assert len(problem) == 1, output
    for text in said:
        assert text in output, f"{text!r} not in {output!r}"
    assert seconds < SENTENCE_WITHIN_S, f"took {seconds:.1f} s"
    run_folder = Path(config["run"]["dir"])
    assert not run_folder.exists() or not [one for one in run_folder.rglob("*") if one.is_file() and one.name != ".lock"]
    return output


def test_unknown_key(config: dict, tmp_path: Path) -> None:
    config["actor"]["layuot"] = {"tp": 2}
    expect_refusal(config, tmp_path, "config.yaml", "actor.layuot", "did you mean actor.layout?")


def test_unknown_key_on_the_command_line(config: dict, tmp_path: Path) -> None:
    expect_refusal(config, tmp_path, "run.num_step", "did you mean run.num_steps?", overrides=("run.num_step=3",))


@pytest.mark.parametrize(("key", "size", "rule"), [("tp", 3, "num_attention_heads=4"), ("pp", 3, "num_hidden_layers=4")])
def test_layout_that_divides_nothing(config: dict, tmp_path: Path, key: str, size: int, rule: str) -> None:
    expect_refusal(config, tmp_path, f"actor.layout.{key}={size} must divide {rule}", "use 1", overrides=(f"actor.layout.{key}={size}",))


def test_missing_dataset(config: dict, tmp_path: Path) -> None:
    config["data"]["train"] = str(tmp_path / "none.parquet")
    expect_refusal(config, tmp_path, "none.parquet")


def test_corrupt_parquet(config: dict, tmp_path: Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(Path(config["data"]["train"]).read_bytes()[:5000])
    config["data"]["train"] = str(broken)
    expect_refusal(config, tmp_path, "broken.parquet")


def test_corrupt_jsonl_names_the_line(config: dict, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": "1+1?", "answer": "2"}\n{"question": "2+\n')
    config["data"]["train"] = str(broken)
    expect_refusal(config, tmp_path, "broken.jsonl", "2")


def test_row_without_an_answer(config: dict, tmp_path: Path) -> None:
    bad = tmp_path / "rows.jsonl"
    bad.write_text('{"question": "1+1?", "answer": "2"}\n{"question": "2+2?"}\n')
    config["data"]["train"] = str(bad)
    expect_refusal(config, tmp_path, "rows.jsonl", "answer")


def test_empty_dataset(config: dict, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    config["data"]["train"] = str(empty)
    expect_refusal(config, tmp_path, "empty.jsonl")


def test_fp8_weights_without_a_sync(config: dict, tmp_path: Path) -> None:
    config["data"]["valid"] = config["data"]["train"]
    config["model"]["dtype"] = "bfloat16"
    expect_refusal(config, tmp_path, "engine.fp8=true is for train", command="eval", overrides=("engine.fp8=true",))


def test_an_engine_that_splits_no_head(config: dict, tmp_path: Path) -> None:
    expect_refusal(config, tmp_path, "engine.tp=3 must divide num_attention_heads=4", overrides=("engine.tp=3",))


def test_missing_model(config: dict, tmp_path: Path) -> None:
    config["model"]["path"] = str(tmp_path / "nowhere")
    expect_refusal(config, tmp_path, "model.path", "nowhere", "config.json")


def test_missing_search_cache(config: dict, tmp_path: Path) -> None:
    config["tools"] = {"search": {"cache_path": str(tmp_path / "none.json")}}
    expect_refusal(config, tmp_path, "tools.search.cache_path", "none.json")


def test_unknown_reward(config: dict, tmp_path: Path) -> None:
    config["reward"] = "deep_reserch"
    expect_refusal(config, tmp_path, "deep_reserch", "deep_research")


def test_run_folder_in_use(config: dict, tmp_path: Path) -> None:
    folder = Path(config["run"]["dir"])
    folder.mkdir()
    with open(folder / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        expect_refusal(config, tmp_path, "run.dir", "another run is using this folder")


def test_sft_without_its_section(config: dict, tmp_path: Path) -> None:
    expect_refusal(config, tmp_path, "section sft is missing", command="sft")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a machine with a CUDA device these can run")
@pytest.mark.parametrize("command", ["train", "sft"])
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("actor.fp8.recipe=blockwise", "actor.fp8.recipe=blockwise: there is no CUDA device; remove actor.fp8 to train in bf16"),
        ("actor.transformer=transformer_engine", "actor.transformer=transformer_engine: there is no CUDA device; use auto or local"),
        (
            "actor.optimizer.cpu_offload_fraction=0.5",
            "actor.optimizer.cpu_offload_fraction moves state off a CUDA device, and there is none; set it to 0",
        ),
        ("engine.fp8=true", "engine.fp8=true: there is no CUDA device; use false"),
        ("weights={transport: cuda_ipc, keep_old: false}", "weights.transport=cuda_ipc: there is no CUDA device; use shared_memory"),
    ],
)
def test_kernels_that_this_machine_has_not(config: dict, task: Path, tmp_path: Path, command: str, override: str, sentence: str) -> None:
    config["model"]["dtype"] = "bfloat16"
    config["sft"] = {"demonstrations": str(task / "demonstrations.json")}
    output = expect_refusal(config, tmp_path, command=command, overrides=(override,))
    assert output.splitlines() == [f"megatron-arpo: {sentence}"]


def test_checkpoint_of_another_architecture(config: dict, task: Path, tmp_path: Path) -> None:
    checkpoint = Path(config["run"]["dir"]) / "checkpoints/step_000001"
    checkpoint.mkdir(parents=True)
    other = json.loads((task / "model/config.json").read_text())
    state = {"step": 1, "weight_version": 1, "cursor": [0, 4], "seed": 0}
    saved = {"command": "train", "state": state, "architecture": {"family": "qwen3", "num_layers": 28}, "layout": {"ep": 1}, "model": ""}
    (checkpoint / "state.json").write_text(json.dumps(saved))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    started = time.monotonic()
    code, output = run("train", str(path))
    assert code == 2 and time.monotonic() - started < SENTENCE_WITHIN_S, output
    assert "checkpoint of another architecture: num_layers is 28 there and" in output
    assert str(other["num_hidden_layers"]) in output


def test_convert_of_what_is_no_checkpoint(tmp_path: Path) -> None:
    code, output = run("convert", "to-hf", str(tmp_path), str(tmp_path / "out"))
    assert code == 2 and "not a checkpoint" in output and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "command", [[], ["sft"], ["train"], ["eval"], ["convert"], ["convert", "to-hf"], ["score"], ["check-config"], ["doctor"]]
)
def test_help_is_quick(command: list[str]) -> None:
    started = time.monotonic()
    code, output = run(*command, "--help")
    assert code == 0 and "usage: megatron-arpo" in output
    assert time.monotonic() - started < 2.0
