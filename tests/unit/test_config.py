from __future__ import annotations

from pathlib import Path

import pytest

from megatron_arpo.config.load import dump_config, load_config
from megatron_arpo.families.architecture import Architecture, architecture_from_config

MINIMAL = "run: {dir: runs/x}\nmodel: {path: m}\n"


def load(tmp_path: Path, text: str, *overrides: str):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def test_defaults_are_the_published_ones(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL)
    rollout = config.algorithm.rollout
    assert (rollout.num_rollouts, rollout.num_initial, rollout.beam_size, rollout.alpha, rollout.beta) == (16, 8, 2, 0.5, 0.2)
    assert (config.rollout.prompts_per_step, config.actor.mini_batch_prompts) == (128, 16)
    assert (config.actor.optimizer.lr, config.algorithm.loss.dual_clip, config.tools.max_calls) == (1e-6, 3.0, 3)


def test_round_trip(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "algorithm.rollout={kind: grpo, num_rollouts: 4}", "actor.layout.tp=2")
    assert load(tmp_path, dump_config(config)) == config


def test_overrides_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "/somewhere")
    config = load(tmp_path, "run: {dir: '${PLACE}/x'}\nmodel: {path: '${NOT_SET:-m}'}\n", "run.seed=7")
    assert (config.run.dir, config.model.path, config.run.seed) == (Path("/somewhere/x"), Path("m"), 7)
    with pytest.raises(ValueError, match="environment variable GONE is not set"):
        load(tmp_path, "run: {dir: '${GONE}'}")


@pytest.mark.parametrize(
    ("text", "override", "said"),
    [
        (MINIMAL + "actro: {}\n", "", "unknown key 'actro'; did you mean actor?"),
        (MINIMAL, "actor.layout.pt=2", "unknown key 'actor.layout.pt'; did you mean actor.layout.tp?"),
        (MINIMAL, "actor.lr=2", "unknown key 'actor.lr'; did you mean actor.optimizer.lr?"),
        (MINIMAL, "algorithm.rollout={kind: arpo, alhpa: 1}", "did you mean algorithm.rollout.alpha?"),
        (MINIMAL, "actor.layout.tp=0", "actor.layout.tp=0: input should be greater than or equal to 1"),
        (MINIMAL, "algorithm.rollout.num_initial=17", "algorithm.rollout.kind is missing; use one of arpo, grpo"),
        (MINIMAL, "algorithm.rollout={kind: arpo, num_initial: 17}", "num_initial=17 must not exceed num_rollouts=16"),
        (MINIMAL, "actor.mini_batch_prompts=48", "actor.mini_batch_prompts=48 must divide rollout.prompts_per_step=128"),
        (MINIMAL, "engine.max_model_len=100", "engine.max_model_len=100 is less than"),
        (MINIMAL, "rollout.sampling.temperature=0", "use a positive temperature"),
        (MINIMAL, "rollout.sampling.top_p=0.9", "samples from another distribution"),
        (MINIMAL, "no_value", "must have the form section.key=value"),
        ("run: {dir: x}\n", "", "model is missing; add it"),
        ("run: [", "", "not valid YAML"),
        ("- 1\n", "", "a configuration is a mapping"),
    ],
)
def test_wrong_configurations_are_named(tmp_path: Path, text: str, override: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        load(tmp_path, text, *([override] if override else []))
    assert said in str(error.value)


QWEN3 = {
    "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "vocab_size": 301, "max_position_embeddings": 128, "rope_theta": 5000,
}  # fmt: skip


def test_architecture() -> None:
    found: Architecture = architecture_from_config(QWEN3, "config.json")
    assert (found.head_dim, found.qk_norm, found.qkv_bias, found.rope_theta) == (24, True, False, 5000.0)
    assert (found.padded_vocab_size(1), found.padded_vocab_size(2), found.padded_vocab_size(8)) == (384, 512, 1024)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba"}, "model_type='mamba' is not supported; use one of qwen2, qwen3, llama"),
        ({"rope_scaling": {"type": "yarn"}}, "rope scaling 'yarn' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_unsupported_models_are_refused(change: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("[", r"\[")):
        architecture_from_config(QWEN3 | change, "config.json")


@pytest.mark.parametrize(
    ("tp", "pp", "said"),
    [
        (4, 1, "actor.layout.tp=4 must divide num_key_value_heads=2; use 1 or 2"),
        (1, 3, "actor.layout.pp=3 must divide num_hidden_layers=4; use 1, 2 or 4"),
    ],
)
def test_layouts_that_do_not_fit(tp: int, pp: int, said: str) -> None:
    with pytest.raises(ValueError) as error:
        architecture_from_config(QWEN3, "config.json").check_layout(tp, pp)
    assert said in str(error.value)
