"""Time and memory of an update on a tree batch against the flat batch, by the code of `bench actor-tree`."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_arpo.actor.policy import policy_step
from megatron_arpo.batch.schedule import RowCost
from megatron_arpo.bench import actor_tree
from megatron_arpo.bench.actor import build_updater
from megatron_arpo.config.algorithm import LossSettings
from megatron_arpo.families.flops import key_flops, token_flops
from megatron_arpo.types import PackedRow
from tests.gpu.rows import Recorder
from tests.gpu.sizes import TOY


def test_tree_against_flat(record: Recorder, device: torch.device) -> None:
    card = device.type == "cuda"
    architecture = actor_tree.architecture_of(cuda=True, quick=False) if card else replace(TOY, vocab_size=8192)
    dtype = torch.bfloat16 if card else torch.float32
    updater = build_updater(architecture, dtype, actor_tree.actor_settings(card))
    scale = 1 if card else 128
    cost = RowCost(per_token=token_flops(architecture), per_key=key_flops(architecture))

    def update(rows: list[PackedRow]) -> None:
        policy_step(updater, None, [rows], LossSettings(), temperature=1.0)
        torch.cuda.synchronize()

    for name, (shape, _) in actor_tree.SHAPES.items():
        measured, ratios = actor_tree.measure_shape(name, shape.shrunk(scale), actor_tree.ROW_LIMITS[0] // scale, cost, update)
        for what in ("time_tree_over_flat", "time_ratio_over_token_ratio", "memory_tree_over_flat"):
            ratio = ratios[actor_tree.ratio_name(what, name)]
            bound = {"time_tree_over_flat": 1.0, "time_ratio_over_token_ratio": 1.15}.get(what)
            note = f"{ratio.low:.3f} to {ratio.high:.3f} over {ratio.num_pairs} pairs" if ratio.num_pairs > 1 else ""
            record(f"{name}: {what}", ratio.value, at_most=bound, of_card=True, note=note)
        for row in measured:
            note = f"{row['tokens']} tokens, {row['micro-batches']} rows"
            if row["seconds"]:
                record(f"{name}: {row['form']}, seconds", row["seconds"], of_card=True, note=note)
            else:
                record(f"{name}: {row['form']}, peak GiB", row["peak MiB"] / 1024, of_card=True, note=note)
