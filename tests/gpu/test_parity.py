"""Megatron's own modules in float32 against plain float64 mathematics, and a tree batch against its flat batch."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megatron_arpo.actor.model import unwrap_all
from megatron_arpo.actor.policy import policy_step
from megatron_arpo.actor.update import Updater
from megatron_arpo.config.algorithm import LossSettings
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.types import PackedRow
from tests.gathered import gather_hf_weights
from tests.gpu.models import Weights, logprobs_of, random_weights, with_weights
from tests.gpu.rows import Recorder
from tests.gpu.sizes import medium, rows_of, sequences
from tests.unit.trees import flat_rows, random_tree, tree_rows

STILL = {"kind": "sgd", "lr": 1e-9, "weight_decay": 0.0, "clip_grad": 1e9}


def float64_logprobs(architecture: Architecture, weights: Weights, found: list[list[int]]) -> torch.Tensor:
    """Of every token but the first of each sequence, by transformers' model in float64 on the host."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=architecture.vocab_size,
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.ffn_hidden_size,
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=architecture.num_heads,
        num_key_value_heads=architecture.num_kv_heads,
        max_position_embeddings=architecture.max_positions,
        rms_norm_eps=architecture.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": architecture.rope_theta},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = Qwen2ForCausalLM(config).double()
    model.load_state_dict({name: tensor[: architecture.vocab_size] if "lm_head" in name or "embed" in name else tensor
                           for name, tensor in weights.items()})  # fmt: skip
    kept = []
    for ids in found:
        with torch.no_grad():
            every_TV = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        kept.append(every_TV[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0])
    return torch.cat(kept)


def gradients(updater: Updater, architecture: Architecture, rows: list[PackedRow]) -> tuple[float, Weights]:
    (sums,) = policy_step(updater, None, [rows], LossSettings(), temperature=0.9)
    found = gather_hf_weights(unwrap_all(updater.chunks), architecture, lambda parameter: parameter.main_grad)
    return sums["loss"], {one.name: one.tensor.clone() for one in found}


def test_local_layers_are_exact(record: Recorder, device: torch.device) -> None:
    name = "local layers in float32: log-prob error to transformers in float64"
    if importlib.util.find_spec("transformers") is None:
        record.not_installed(name, "transformers")
        pytest.skip("transformers is not installed")
    architecture = medium(device)
    weights = random_weights(architecture, torch.float32)
    found = sequences(4, 200, architecture.vocab_size)
    updater = with_weights(architecture, torch.float32, weights, transformer="local", optimizer=STILL)
    ours = logprobs_of(updater, rows_of(found, 512))
    error = float((ours.double() - float64_logprobs(architecture, weights, found)).abs().max())
    record(name, error, at_most=1e-4, note=f"{len(ours)} tokens, nats")


def test_a_tree_batch_has_the_gradients_of_the_flat_batch(record: Recorder, device: torch.device) -> None:
    architecture = medium(device)
    updater = with_weights(architecture, torch.float32, random_weights(architecture, torch.float32), transformer="local", optimizer=STILL)
    trees = [random_tree(seed, num_initial=4, prompt_id=str(seed)) for seed in (21, 22, 23)]
    tree_loss, tree = gradients(updater, architecture, tree_rows(trees, "token-mean", "soft", 4096))
    flat_loss, flat = gradients(updater, architecture, flat_rows(trees, "token-mean", "soft"))
    worst = max(float((tree[name] - flat[name]).abs().max() / flat[name].abs().max().clamp(min=1e-12)) for name in flat)
    record("tree batch over flat batch, float32: loss difference", abs(tree_loss - flat_loss), at_most=1e-5)
    record("tree batch over flat batch, float32: gradient difference", worst, at_most=1e-3, note="over the tensor's largest value")
