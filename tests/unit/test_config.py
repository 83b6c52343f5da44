from __future__ import annotations

from pathlib import Path

import pytest

from megatron_arpo.config.actor import ActorSettings, Fp8Settings, LayoutSettings, OptimizerSettings, RecomputeSettings
from megatron_arpo.config.load import dump_config, load_config
from megatron_arpo.families.architecture import Architecture, Experts, RopeScaling, architecture_from_config

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
        ("run: {dir: x}\nmodel: {path: m, dtype: float32}\n", "engine.fp8=true", "engine.fp8=true makes FP8 of bf16 weights"),
        (MINIMAL, "weights.transport=cuda_ipc", "has no room for a second version on the GPU; set weights.keep_old=false"),
        (MINIMAL, "weights.folder=x", "weights.folder=x is for weights.transport=checkpoint; take it out"),
        (MINIMAL, "weights={transport: checkpoint, keep_old: false}", "always keeps the old version; set weights.keep_old=true"),
        (MINIMAL, "weights.bucket_bytes=10", "weights.bucket_bytes=10: input should be greater than or equal to 1048576"),
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
        ({"model_type": "mamba"}, "model_type='mamba' is not supported; use one of qwen2, qwen3, qwen3_moe, llama"),
        ({"rope_scaling": {"type": "yarn"}}, "rope scaling 'yarn' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_unsupported_models_are_refused(change: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("[", r"\[")):
        architecture_from_config(QWEN3 | change, "config.json")


QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    ("model", "layout", "said"),
    [
        (QWEN3, {"tp": 4}, "actor.layout.tp=4 must divide num_key_value_heads=2; use 1 or 2"),
        (QWEN3, {"pp": 3}, "actor.layout.pp=3 must divide num_hidden_layers=4; 3 does not, use 1, 2 or 4"),
        (QWEN3, {"pp": 2, "vpp": 3}, "actor.layout.pp=2 times vpp=3 must divide num_hidden_layers=4; 6 does not"),
        (QWEN3, {"vpp": 2}, "actor.layout.vpp=2 interleaves pipeline stages, but pp=1"),
        (QWEN3, {"sequence_parallel": True}, "actor.layout.sequence_parallel=true splits over tensor-parallel ranks, but tp=1"),
        (QWEN3, {"dp": 2, "ep": 2}, "model_type=qwen3 has no experts"),
        (QWEN3_MOE, {"dp": 3, "ep": 2}, "actor.layout.ep=2 times etp=1 must divide the 3 ranks"),
        (QWEN3_MOE, {"dp": 8, "ep": 8}, "actor.layout.ep=8 must divide num_experts=4"),
        (QWEN3_MOE, {"tp": 2, "ep": 2}, "actor.layout.tp=2 with experts needs sequence parallelism"),
        (QWEN3_MOE, {"tp": 2, "sequence_parallel": True}, "actor.layout.etp=1 must equal tp=2 where ep=1"),
        (QWEN3_MOE, {"tp": 2, "dp": 32, "ep": 1, "etp": 64}, "actor.layout.etp=64 must divide moe_intermediate_size=96"),
    ],
)
def test_layouts_that_do_not_fit(model: dict, layout: dict, said: str) -> None:
    with pytest.raises(ValueError) as error:
        architecture_from_config(model, "config.json").check_layout(LayoutSettings(**layout))
    assert said in str(error.value)


def test_llama_rope_scaling_and_experts_are_read() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for place in ({"rope_scaling": scaling}, {"rope_parameters": {**scaling, "rope_theta": 5e5}}):
        found = architecture_from_config(QWEN3 | {"model_type": "llama", "rope_theta": 5e5} | place, "config.json")
        assert found.rope_scaling == RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
        assert found.rope_theta == 5e5
    experts = architecture_from_config(QWEN3_MOE, "config.json").experts
    assert experts == Experts(num_experts=4, num_active=2, ffn_hidden_size=96, normalize_weights=True)


def test_recomputed_modules_must_be_there() -> None:
    dense, experts = architecture_from_config(QWEN3, "config.json"), architecture_from_config(QWEN3_MOE, "config.json")
    with pytest.raises(ValueError, match=r"actor.recompute.modules has 'moe', but model_type=qwen3 has no experts"):
        dense.check_recompute(RecomputeSettings(granularity="selective", modules=("core_attn", "moe")), LayoutSettings())
    with pytest.raises(ValueError, match="'mlp', but model_type=qwen3_moe has experts in place of an mlp"):
        experts.check_recompute(RecomputeSettings(granularity="selective", modules=("mlp",)), LayoutSettings())
    experts.check_recompute(RecomputeSettings(granularity="full", layers=2), LayoutSettings(pp=2))
    with pytest.raises(ValueError, match=r"actor.recompute.layers=4 must divide the 2 layers of a chunk; use 1 or 2"):
        dense.check_recompute(RecomputeSettings(granularity="full", layers=4), LayoutSettings(pp=2))
    with pytest.raises(ValueError, match="delayed FP8 recipe can't recompute layernorm"):
        ActorSettings(
            fp8=Fp8Settings(recipe="delayed", first_last_layers_bf16=False),
            recompute=RecomputeSettings(granularity="selective", modules=("layernorm",)),
        )


def test_fp8_and_offload_settings_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="delayed has no bf16 layers"):
        Fp8Settings(recipe="delayed")
    with pytest.raises(ValueError, match="cpu_offload_fraction moves Adam's state"):
        OptimizerSettings(kind="sgd", cpu_offload_fraction=0.5)
