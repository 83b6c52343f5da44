"""Which checkpoints a run folder lets a run go on from."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from megatron_arpo.config.load import load_config
from megatron_arpo.config.run import RunConfig
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.run.folder import RunFolder, read_checkpoint
from megatron_arpo.types import RunState

ARCHITECTURE = Architecture(
    family="qwen3", num_layers=2, hidden_size=8, ffn_hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=10,
    tied_embeddings=True, norm_eps=1e-6, rope_theta=1e4, max_positions=64, qkv_bias=False, qk_norm=True,
)  # fmt: skip


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    path = tmp_path / "config.yaml"
    path.write_text(f"run: {{dir: {tmp_path}/run}}\nmodel: {{path: {tmp_path}}}\n")
    return load_config(path, overrides)


def folder_with_checkpoint(tmp_path: Path, *overrides: str) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    state = RunState(step=3, weight_version=2, cursor=(0, 5), seed=0)
    folder.save_checkpoint("train", config(tmp_path, *overrides), state, ARCHITECTURE, lambda path: (path / "tensor").touch())
    return folder


def test_a_checkpoint_keeps_state_and_layout(tmp_path: Path) -> None:
    with closing(folder_with_checkpoint(tmp_path, "actor.layout.pp=2")) as folder:
        start = folder.starting_point("train", config(tmp_path, "actor.layout.tp=2"), ARCHITECTURE)
        assert start.checkpoint == tmp_path / "run/checkpoints/step_000003"
        assert start.state == RunState(step=3, weight_version=2, cursor=(0, 5), seed=0)
        assert read_checkpoint(start.checkpoint).layout["pp"] == 2


@pytest.mark.parametrize(
    ("command", "overrides", "said"),
    [
        ("sft", (), "holds a run of 'train', not of 'sft'"),
        ("train", ("run.seed=1",), "run.seed=1 but .* was made with 0"),
        ("train", ("run.resume=false",), "run.resume is false"),
        ("train", ("algorithm.loss.kl_coef=0.1",), "is the reference and has other weights than the model that .* began with"),
        ("train", ("actor.layout.ep=1",), "actor.layout.ep=1 but .* was written with ep=2.*use ep=2, or `megatron-arpo convert to-hf`"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path, command: str, overrides: tuple[str, ...], said: str) -> None:
    split = ("actor.layout.dp=2", "actor.layout.ep=2")
    with closing(folder_with_checkpoint(tmp_path, *split)) as folder:
        (tmp_path / "model.safetensors").write_bytes(b"another model")
        with pytest.raises(ValueError, match=said):
            folder.starting_point(command, config(tmp_path, *split, *overrides), ARCHITECTURE)


def test_damaged_state_is_named(tmp_path: Path) -> None:
    with closing(folder_with_checkpoint(tmp_path)) as folder:
        path = folder.newest_checkpoint()
        (path / "state.json").write_text(json.dumps({"state": {"step": 1}}))
        with pytest.raises(ValueError, match=r"state\.json: damaged"):
            read_checkpoint(path)
