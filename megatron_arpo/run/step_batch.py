"""Scored trees -> the rows of each optimizer update, for every data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_arpo.algorithm.advantage import group_advantages, leaf_weights
from megatron_arpo.batch.schedule import assign_rows
from megatron_arpo.batch.tree import WeightedTree, pack_trees
from megatron_arpo.config.run import RunConfig
from megatron_arpo.types import PackedRow, RolloutTree


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """`mini_batches[i][d]`: rows of update i on data-parallel rank d. `num_equal_groups`: trees whose leaves all scored the same;
    they have no gradient, so they are not computed. `num_skipped_updates`: mini-batches of such trees alone."""

    mini_batches: tuple[tuple[tuple[PackedRow, ...], ...], ...]
    num_equal_groups: int
    num_skipped_updates: int


def make_batch(trees: Sequence[RolloutTree], config: RunConfig) -> StepBatch:
    """Denominators are those of the whole mini-batch, trees without a gradient included."""
    size = config.actor.mini_batch_prompts
    mini_batches, num_equal = [], 0
    num_updates = 0
    for start in range(0, len(trees), size):
        num_updates += 1
        mine = trees[start : start + size]
        weights = leaf_weights(mine, config.algorithm.loss.aggregation)
        weighted = [
            WeightedTree(tree=tree, advantages=group_advantages([reward.score for reward in tree.rewards]), weights=tree_weights)
            for tree, tree_weights in zip(mine, weights, strict=True)
        ]
        with_gradient = [tree for tree in weighted if any(tree.advantages)]
        num_equal += len(weighted) - len(with_gradient)
        if not with_gradient:
            continue
        rows = pack_trees(with_gradient, config.actor.max_row_tokens, config.algorithm.attribution)
        mini_batches.append(tuple(tuple(rank) for rank in assign_rows(rows, config.actor.layout.dp)))
    return StepBatch(mini_batches=tuple(mini_batches), num_equal_groups=num_equal, num_skipped_updates=num_updates - len(mini_batches))
