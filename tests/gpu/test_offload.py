"""Optimizer state in host memory: the same losses, less device memory, and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_arpo.actor import checkpoint
from megatron_arpo.actor.offload import hybrid_optimizers
from megatron_arpo.actor.update import Updater
from megatron_arpo.families.architecture import Architecture
from tests.gpu.models import Weights, free, largest_relative, losses_of, random_weights, with_weights
from tests.gpu.rows import Recorder
from tests.gpu.sizes import medium, rows_of, sequences

ADAM = {"lr": 1e-3, "schedule": "constant", "warmup_updates": 2}


def offload_differences(architecture: Architecture, folder: Path, fraction: float, num_steps: int = 10) -> dict[str, float]:
    """Largest relative difference of losses: to an optimizer on the device, and behind checkpoints that another optimizer loads than
    the one that saved them. The share of the state that is on the host, and the device memory held over that without offload."""
    weights = random_weights(architecture, torch.bfloat16)
    rows = rows_of(sequences(2, 64, architecture.vocab_size), 64)
    losses, held = {}, {}
    for kind, share in (("device", 0.0), ("host", fraction)):
        before = _allocated()
        updater = offloaded(architecture, weights, share)
        losses[kind] = losses_of(updater, rows, num_steps)
        held[kind] = _allocated() - before
        if kind == "device":
            free(updater)
    (hybrid,) = hybrid_optimizers(updater.optimizer)
    on_host = sum(parameter.numel() for inner in hybrid.cpu_optimizers for group in inner.param_groups for parameter in group["params"])
    everywhere = sum(parameter.numel() for group in hybrid.param_groups for parameter in group["params"])
    saved, early = folder / "saved", folder / "early"
    saved.mkdir()
    early.mkdir()
    checkpoint.save(updater, saved)
    going_on = losses_of(updater, rows, 3)
    free(updater)
    other = offloaded(architecture, weights, fraction)
    checkpoint.save(other, early)
    checkpoint.load(other, saved)
    resumed = losses_of(other, rows, 3)
    checkpoint.load(other, early)
    again = losses_of(other, rows, num_steps)
    free(other)
    back = offloaded(architecture, weights, 0.0)
    checkpoint.load(back, saved)
    resumed_on_device = losses_of(back, rows, 3)
    free(back)
    return {
        "losses": largest_relative(losses["host"], losses["device"]),
        "resumed": largest_relative(resumed, going_on),
        "resumed on the device": largest_relative(resumed_on_device, going_on),
        "from the start": largest_relative(again, losses["host"]),
        "learned": losses["host"][-1] / losses["host"][0],
        "share on the host": on_host / everywhere,
        "bytes": held["host"] / max(held["device"], 1),
    }


def offloaded(architecture: Architecture, weights: Weights, fraction: float) -> Updater:
    optimizer = {**ADAM, "cpu_offload_fraction": fraction}
    return with_weights(architecture, torch.bfloat16, weights, transformer="local", optimizer=optimizer)


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_optimizer_in_host_memory(record: Recorder, device: torch.device, tmp_path: Path, fraction: float) -> None:
    name = f"optimizer offload, {fraction:g} of the state"
    if device.type != "cuda":
        record.skipped(name, "Megatron's hybrid optimizer needs a device; tests/unit/test_offload.py runs it with a pretended one")
        pytest.skip("no CUDA device")
    found = offload_differences(medium(device), tmp_path, fraction)
    record(f"{name}: loss difference over 10 steps", found["losses"], at_most=0.005)
    record(f"{name}: loss after 10 steps over the first", found["learned"], at_most=0.98)
    record(f"{name}: loss difference of a resumed run", found["resumed"], at_most=1e-4)
    record(f"{name}: loss difference of a run resumed without offload", found["resumed on the device"], at_most=0.005)
    record(f"{name}: loss difference from a checkpoint before the first step", found["from the start"], at_most=1e-4)
    record(f"{name}: device memory held over none offloaded", found["bytes"], at_most=1.0)
