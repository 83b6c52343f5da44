"""Conversion loses nothing, and what it writes is the model that transformers computes, in every layout: Hugging Face to Megatron and
back, from verl's checkpoints of every kind, and from a checkpoint of one layout into another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_arpo.config.actor import LayoutSettings
from megatron_arpo.convert.command import convert, verify
from megatron_arpo.convert.open_source import open_source
from megatron_arpo.convert.source import TensorSource
from megatron_arpo.convert.verify import compare
from tests.contract.conversion_ranks import run_conversion_rank
from tests.contract.layouts import LAYOUTS, make_models, reference_scores, run_ranks

pytestmark = pytest.mark.slow
FAMILIES_IN = {
    "TP2": ["qwen3", "qwen2", "llama"],
    "PP2": ["qwen2", "qwen3_moe"],
    "VPP2": ["llama", "qwen3"],
    "EP2": ["qwen3_moe"],
    "TP2xPP2": ["qwen3", "qwen2"],
}
EVERY = [(name, family) for name, families in FAMILIES_IN.items() for family in families]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conversion")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    return make_models(folder / "models")


@pytest.fixture(scope="module")
def converted(folder: Path, models: dict[str, Path]) -> dict[str, Path]:
    """Megatron checkpoints of all models."""
    for family, model in models.items():
        run_convert("to-megatron", model, folder / "converted" / family)
    return {family: folder / "converted" / family for family in models}


@pytest.fixture(scope="module")
def ranks(folder: Path, models: dict[str, Path], converted: dict[str, Path]):
    """A function from layout to what its ranks found and the folder they left verl's checkpoints in."""
    known: dict[str, tuple[list[dict], Path]] = {}

    def launched(name: str) -> tuple[list[dict], Path]:
        if name not in known:
            left = folder / "left" / name
            left.mkdir(parents=True)
            job = {
                "layout": LAYOUTS[name],
                "models": {family: str(models[family]) for family in FAMILIES_IN[name]},
                "converted": {family: str(path / "weights") for family, path in converted.items()},
                "verl": str(left / "verl"),
                "verl_before": str(left / "verl_before"),
                "fsdp": str(left / "fsdp"),
            }
            job_path = left / "job.json"
            job_path.write_text(json.dumps(job))
            known[name] = run_ranks(run_conversion_rank, LayoutSettings(**LAYOUTS[name]).world_size, job_path), left
        return known[name]

    return launched


def run_convert(kind: str, source: Path, target: Path, **options) -> None:
    convert(kind, source, target, **{"hf_config": None, "workers": 2, "max_shard_gib": 5.0, "dtype": None} | options)


def problems(one: TensorSource, other: TensorSource) -> list[str]:
    found = compare(one, other, workers=2, dtype=None)
    assert found.num_equal or found.problems
    return list(found.problems)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe"])
def test_there_and_back_is_the_same_bytes(models: dict[str, Path], family: str, tied: bool, dtype: str, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(models[family], tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # biases of 0 and norms of 1 would hide a mix-up
    model.save_pretrained(tmp_path / "hf")
    run_convert("to-megatron", tmp_path / "hf", tmp_path / "megatron", max_shard_gib=0.0001)
    run_convert("to-hf", tmp_path / "megatron", tmp_path / "back", max_shard_gib=0.0002)
    assert not problems(open_source(tmp_path / "hf"), open_source(tmp_path / "back"))
    assert verify(tmp_path / "hf", tmp_path / "back", hf_config=None, workers=1, dtype=None)
    loaded, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 1
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), loaded.state_dict()[name].view(torch.uint8)), name


@pytest.mark.parametrize(("name", "family"), EVERY)
def test_logprobs_of_the_converted_model(ranks, models: dict[str, Path], name: str, family: str) -> None:
    found = next(rank for rank in ranks(name)[0] if rank["reports"])["scores"][family]
    assert found == pytest.approx(reference_scores(models[family]), abs=1e-4)


@pytest.mark.parametrize("config_in", ["huggingface", "hf_config"])
@pytest.mark.parametrize(("name", "family"), EVERY)
def test_verl_dist_checkpoint(ranks, models: dict[str, Path], name: str, family: str, config_in: str, tmp_path: Path) -> None:
    actor = ranks(name)[1] / "verl" / family
    if config_in == "huggingface":
        shutil.copytree(models[family], actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
        assert not problems(open_source(models[family]), open_source(actor))
        run_convert("to-hf", actor, tmp_path / "hf")
        assert not problems(open_source(models[family]), open_source(tmp_path / "hf"))
    else:
        source = open_source(actor / "dist_ckpt", models[family])
        assert source.kind == "Megatron dist-checkpoint" and not problems(open_source(models[family]), source)


@pytest.mark.parametrize(("name", "family"), EVERY)
def test_verl_ranks_of_the_published_code(ranks, models: dict[str, Path], name: str, family: str) -> None:
    actor = ranks(name)[1] / "verl_before" / family
    shutil.copytree(models[family], actor / "hf_config_and_tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    if "EP" in name:
        with pytest.raises(ValueError, match="is missing; the checkpoint is not whole"):
            run_convert("to-hf", actor, actor.parent / "hf")
        return
    source = open_source(actor)
    assert source.kind == "verl Megatron checkpoint" and not problems(open_source(models[family]), source)


@pytest.mark.parametrize(("name", "family"), EVERY)
def test_verl_fsdp(ranks, models: dict[str, Path], name: str, family: str, tmp_path: Path) -> None:
    actor = tmp_path / "actor"  # verl names the folder so, below global_step_N
    shutil.copytree(ranks(name)[1] / "fsdp" / family, actor)
    shutil.copytree(models[family], actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    source = open_source(tmp_path)
    assert source.kind == "verl FSDP checkpoint" and not problems(open_source(models[family]), source)
    run_convert("to-megatron", tmp_path, tmp_path / "megatron")
    assert not problems(open_source(models[family]), open_source(tmp_path / "megatron"))
    (actor / f"model_world_size_{LayoutSettings(**LAYOUTS[name]).world_size}_rank_1.pt").unlink()
    with pytest.raises(ValueError, match=r"_rank_1\.pt is missing; copy the files of all ranks"):
        open_source(tmp_path)
