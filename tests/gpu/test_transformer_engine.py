"""Megatron's own layers against Transformer Engine's, and bf16 against FP8 in the latter."""

from __future__ import annotations

import pytest
import torch

from megatron_arpo.actor.kernels import LEAST_CAPABILITY, fp8_obstacle, transformer_engine_obstacle
from tests.gpu.models import free, largest_relative, logprobs_of, losses_of, median_seconds, random_weights, with_weights
from tests.gpu.rows import Recorder
from tests.gpu.sizes import rows_of, sequences, wide

LOCAL_AND_TE = "local over Transformer Engine layers, bf16"
FP8_STEPS = 50


def compare(device: torch.device, first: dict, second: dict, num_steps: int, lr: float) -> dict[str, float]:
    """Mean log-prob difference before any update, largest relative loss difference over `num_steps` updates, and the ratio of
    step times, of two settings of the actor with equal weights, second over first."""
    card = device.type == "cuda"
    architecture = wide(device, num_layers=4)
    weights = random_weights(architecture, torch.bfloat16)
    length = 4096 if card else 48
    rows = rows_of(sequences(2, length, architecture.vocab_size), length)
    logprobs, losses, seconds = [], [], []
    for settings in (first, second):
        updater = with_weights(architecture, torch.bfloat16, weights, **settings, optimizer={"lr": lr})
        logprobs.append(logprobs_of(updater, rows))
        losses.append(losses_of(updater, rows, num_steps))
        seconds.append(median_seconds(lambda updater=updater: updater.sft_step(rows)))
        free(updater)
    return {
        "log-probs": float((logprobs[1] - logprobs[0]).abs().mean()),
        "losses": largest_relative(losses[1], losses[0]),
        "step time": seconds[1] / seconds[0],
        "last loss": losses[1][-1],
    }


def test_a_setting_against_itself(record: Recorder, device: torch.device) -> None:
    """How far two runs of one setting are apart: what the other rows can't be blamed for."""
    found = compare(device, {"transformer": "local"}, {"transformer": "local"}, num_steps=3, lr=1e-5)
    record("local layers over themselves, bf16: mean log-prob difference", found["log-probs"], at_most=1e-3, note="nats")
    record("local layers over themselves, bf16: loss difference over 3 steps", found["losses"], at_most=1e-3)


def test_local_layers_against_transformer_engine(record: Recorder, device: torch.device) -> None:
    if obstacle := transformer_engine_obstacle():
        record.not_installed(LOCAL_AND_TE, obstacle)
        pytest.skip(obstacle)
    found = compare(device, {"transformer": "transformer_engine"}, {"transformer": "local"}, num_steps=10, lr=1e-5)
    record(f"{LOCAL_AND_TE}: mean log-prob difference", found["log-probs"], at_most=0.03, note="nats")
    record(f"{LOCAL_AND_TE}: loss difference over 10 steps", found["losses"], at_most=0.01)
    record(f"{LOCAL_AND_TE}: step time", found["step time"], of_card=True)


@pytest.mark.parametrize("recipe", LEAST_CAPABILITY)
def test_fp8_learns_as_bf16_and_sooner(record: Recorder, device: torch.device, recipe: str) -> None:
    name = f"FP8 {recipe} over bf16"
    if obstacle := fp8_obstacle(recipe):
        missing = transformer_engine_obstacle() is not None
        (record.not_installed if missing else record.skipped)(name, obstacle)
        pytest.skip(obstacle)
    layers = {"transformer": "transformer_engine"}
    fp8 = {"recipe": recipe, "first_last_layers_bf16": False}
    found = compare(device, layers, {**layers, "fp8": fp8}, num_steps=FP8_STEPS, lr=2e-5)
    record(f"{name}: loss difference over {FP8_STEPS} steps", found["losses"], at_most=0.02, note=f"last loss {found['last loss']:.3f}")
    record(f"{name}: step time", found["step time"], at_most=0.8, of_card=True)
