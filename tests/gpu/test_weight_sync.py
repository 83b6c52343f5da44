"""Weights of a 7B model from an actor's process into another process on the same card, through CUDA IPC."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_arpo.bench.sync import Case, open_sides, open_sync
from megatron_arpo.config.actor import LayoutSettings
from megatron_arpo.weights.peers import call
from tests.gpu.rows import Recorder
from tests.gpu.sizes import TOY, WIDE

NUM_SYNCS = 5


def test_weights_through_cuda_ipc(record: Recorder, device: torch.device) -> None:
    card = device.type == "cuda"
    architecture = replace(WIDE, num_layers=28) if card else replace(TOY, hidden_size=256, head_dim=64, vocab_size=384)
    case = Case(name="one card", layout=LayoutSettings(), num_engines=1, tp=1)
    with open_sides(case, architecture) as sides:
        sync = open_sync(sides, case, {"transport": "cuda_ipc", "keep_old": False}, bucket_bytes=2**29 if card else 2**20)
        found = [sync.push(version, []) for version in range(1, 2 + NUM_SYNCS)][1:]  # the first touches the memory
        sums = [call(side, "digest") for side in (sides.actors, sides.workers)]
    record("weights through CUDA IPC: sums differ", abs(sums[0][0] - sums[1][0]) / max(abs(sums[0][0]), 1e-9), at_most=1e-6)
    seconds = sorted(one["seconds"] for one in found)
    note = f"{sync.plan.model_bytes / 1e9:.1f} GB in {len(sync.plan.buckets)} buckets, {seconds[0]:.3f} to {seconds[-1]:.3f} s"
    record("weights through CUDA IPC, seconds", seconds[len(seconds) // 2], at_most=1.0, of_card=True, note=note)
    record("weights through CUDA IPC, GB/s", sync.plan.moved_bytes / seconds[len(seconds) // 2] / 1e9, of_card=True)
