"""Random trees through the Megatron model: tree and split rows have the loss and every gradient of the flat batch.

Run as `python -m tests.contract.tree_exactness MODEL`; hypothesis raises for a counterexample.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megatron_arpo.actor import layout
from megatron_arpo.actor.device import prepare
from megatron_arpo.actor.reference import ReferencePolicy
from megatron_arpo.config.actor import ActorSettings, LayoutSettings
from megatron_arpo.config.algorithm import LossSettings
from tests.contract.actor_ranks import GENTLE_SGD, NARROW, Actor, largest_difference
from tests.contract.layouts import make_models
from tests.unit.trees import flat_rows, joined, random_tree, tree_rows

LOSSES = st.builds(
    LossSettings,
    clip_low=st.just(NARROW["clip_low"]),
    clip_high=st.just(NARROW["clip_high"]),
    dual_clip=st.sampled_from([None, 1.01, 3.0]),
    aepo_clipping=st.booleans(),
    entropy_advantage=st.sampled_from([0.0, 0.2]),
    kl_coef=st.sampled_from([0.0, 0.1]),
    aggregation=st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]),
    importance_cap=st.sampled_from([None, 2.0]),
)


def main() -> None:
    prepare()
    layout.initialize(LayoutSettings(), torch.distributed.HashStore(), rank=0, world_size=1, seed=0)
    folder = tempfile.TemporaryDirectory()  # until the last check: the actor reads its first weights again and again
    actor = Actor(make_models(Path(folder.name))[sys.argv[1]], ActorSettings(optimizer=GENTLE_SGD, logits_chunk_tokens=16))
    actor.load(factor=1.1)
    reference = ReferencePolicy(actor.updater.chunks)

    @settings(max_examples=int(sys.argv[2]), deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(
        seed=st.integers(0, 10**6),
        num_trees=st.integers(2, 3),
        num_initial=st.integers(2, 5),
        limit=st.integers(40, 200),
        attribution=st.sampled_from(["soft", "hard"]),
        loss=LOSSES,
    )
    def check(seed: int, num_trees: int, num_initial: int, limit: int, attribution: str, loss: LossSettings) -> None:
        trees = [random_tree(seed + index, num_initial=num_initial, prompt_id=str(index)) for index in range(num_trees)]
        batches = [trees[:1], trees[1:]]
        found = {}
        for form in ("flat", "tree", "split"):
            actor.load()
            if form == "flat":
                rows = [[joined(flat_rows(batch, loss.aggregation, attribution))] for batch in batches]
            else:
                rows = [tree_rows(batch, loss.aggregation, attribution, limit if form == "split" else 4096) for batch in batches]
            sums = actor.step(rows, loss, reference)
            found[form] = [one["loss"] for one in sums], actor.gradients()
        for form in ("tree", "split"):
            losses, gradients = found[form]
            size = max(1.0, *map(abs, losses))
            assert all(abs(one - other) < 1e-5 * size for one, other in zip(losses, found["flat"][0], strict=True)), (
                losses,
                found["flat"][0],
            )
            assert largest_difference(gradients, found["flat"][1]) < 1e-5, largest_difference(gradients, found["flat"][1])

    check()
    folder.cleanup()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
