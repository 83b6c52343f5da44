"""The Megatron actor is the same model in every layout: log-probs as transformers gives them, tree batches equal to flat
batches, equal losses and gradient norms, checkpoints that go on in the same and in another layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
VOCABULARY = 301  # divides by nothing: padding is at work
LAYOUTS = {"tp1": (1, 1, 1), "tp2": (2, 1, 1), "pp2": (1, 2, 1), "dp2": (1, 1, 2)}


def make_models(folder: Path) -> dict[str, Path]:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    common = dict(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, initializer_range=0.06,
    )  # fmt: skip
    kinds = {
        "qwen2": (Qwen2ForCausalLM, Qwen2Config(**common, tie_word_embeddings=False)),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config(**common, head_dim=24, tie_word_embeddings=True)),
        "llama": (LlamaForCausalLM, LlamaConfig(**common, tie_word_embeddings=False)),
    }
    found = {}
    for family, (kind, config) in kinds.items():
        torch.manual_seed(5)
        model = kind(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms and biases start at 1 and 0, which would hide a mix-up
                    parameter.add_(0.1 * torch.randn_like(parameter))
        found[family] = folder / family
        model.save_pretrained(found[family])
    return found


def reference_scores(model_path: Path) -> list[float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    found: list[float] = []
    for length in (7, 19, 30):
        ids = torch.randint(0, 300, (length,), generator=generator)
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
        found.extend(logprobs[:-1].gather(1, ids[1:, None])[:, 0].tolist())
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """Layout -> what each of its ranks found."""
    folder = tmp_path_factory.mktemp("layouts")
    models = make_models(folder)
    found: dict[str, list[dict]] = {}
    previous = None
    for name, (tp, pp, dp) in LAYOUTS.items():
        job = folder / f"{name}.json"
        checkpoint = str(folder / f"{name}.checkpoint")
        job.write_text(
            json.dumps(
                {
                    "tp": tp,
                    "pp": pp,
                    "models": {k: str(v) for k, v in models.items()},
                    "checkpoint": checkpoint,
                    "other_checkpoint": previous,
                }
            )
        )
        world_size = tp * pp * dp
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.contract.actor_ranks", str(rank), str(world_size), str(job)],
                cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(world_size)
        ]  # fmt: skip
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
        assert all(rank.returncode == 0 for rank in ranks), "\n".join(output[-3000:] for output in outputs)
        found[name] = [json.loads(job.with_suffix(f".rank{rank}").read_text()) for rank in range(world_size)]
        previous = checkpoint
    found["reference"] = [{family: reference_scores(path) for family, path in models.items()}]
    return found


def reporting(ranks: list[dict]) -> dict:
    return next(rank for rank in ranks if rank["reports"])


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_logprobs_are_those_of_transformers(results, name: str, family: str) -> None:
    found = reporting(results[name])["families"][family]["scores"]
    assert found == pytest.approx(results["reference"][0][family], abs=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_export_gives_back_the_same_bytes(results, name: str) -> None:
    for family in ("qwen2", "qwen3", "llama"):
        assert all(rank["families"][family]["export_equal"] for rank in results[name])
        names = {tensor for rank in results[name] for tensor in rank["families"][family]["exported"]}
        assert len(names) == len(set(results["tp1"][0]["families"][family]["exported"]))


@pytest.mark.parametrize("name", LAYOUTS)
def test_tree_and_split_rows_have_the_gradients_of_the_flat_batch(results, name: str) -> None:
    for rank in results[name]:
        assert rank["losses"]["tree"] == pytest.approx(rank["losses"]["flat"], rel=1e-5)
        assert rank["losses"]["split"] == pytest.approx(rank["losses"]["flat"], rel=1e-5)
        assert max(rank["gradient_differences"].values()) < 1e-5


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "tp1"])
def test_updates_agree_with_one_process(results, name: str) -> None:
    one = results["tp1"][0]["adam"]
    # data-parallel ranks each report their own part of the loss
    parts = [rank["adam"] for rank in results[name] if rank["reports"]]
    for update, (loss, norm) in enumerate(one):
        assert sum(part[update][0] for part in parts) == pytest.approx(loss, rel=2e-4, abs=2e-5)
        assert all(part[update][1] == pytest.approx(norm, rel=2e-4) for part in parts)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_resumed_run_goes_on_bit_for_bit(results, name: str) -> None:
    for rank in results[name]:
        assert rank["digest_saved"] == rank["digest_loaded"]
        assert rank["resumed_equal"]


@pytest.mark.parametrize(("name", "other"), [("tp2", "tp1"), ("pp2", "tp2"), ("dp2", "pp2")])
def test_a_checkpoint_goes_on_in_another_layout(results, name: str, other: str) -> None:
    expected = [
        [sum(part[update][0] for part in parts), parts[0][update][1]]
        for parts in [[rank["continued"] for rank in results[other] if rank["reports"]]]
        for update in range(2)
    ]
    parts = [rank["continued_from_other_layout"] for rank in results[name] if rank["reports"]]
    for update, (loss, norm) in enumerate(expected):
        assert sum(part[update][0] for part in parts) == pytest.approx(loss, rel=2e-4, abs=2e-5)
        assert parts[0][update][1] == pytest.approx(norm, rel=2e-4)
