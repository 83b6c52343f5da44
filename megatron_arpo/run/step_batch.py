"""Scored trees -> the rows of each optimizer update, for every data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_arpo.algorithm.advantage import group_advantages, leaf_weights
from megatron_arpo.batch.schedule import Placement, RowCost, Schedule, schedule_trees
from megatron_arpo.batch.tree import WeightedTree
from megatron_arpo.config.actor import ActorSettings
from megatron_arpo.config.run import RunConfig
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.families.flops import key_flops, token_flops
from megatron_arpo.types import RolloutTree


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """`updates`: rows of each update. `num_equal_groups`: trees whose leaves all scored the same; without a KL they have no gradient,
    so they are not computed, unless AEPO's statistics of entropies need them in a mini-batch with others. `num_skipped_updates`:
    mini-batches without a gradient."""

    updates: tuple[Schedule, ...]
    num_equal_groups: int
    num_skipped_updates: int


def row_cost(architecture: Architecture) -> RowCost:
    return RowCost(per_token=token_flops(architecture), per_key=key_flops(architecture))


def placement_of(actor: ActorSettings, cost: RowCost) -> Placement:
    layout = actor.layout
    return Placement(
        num_ranks=layout.dp,
        max_row_tokens=actor.max_row_tokens,
        cost=cost,
        multiple_of=layout.micro_batch_multiple,
        num_stages=layout.pp,
        even_micro_batches=layout.pp > 1 or layout.ep > 1,
        largest_to_mean=actor.largest_to_mean_cost,
    )


def make_batch(trees: Sequence[RolloutTree], config: RunConfig, cost: RowCost) -> StepBatch:
    """Denominators are those of the whole mini-batch, trees without a gradient included."""
    size, placement = config.actor.mini_batch_prompts, placement_of(config.actor, cost)
    loss = config.algorithm.loss
    updates, num_equal, num_skipped = [], 0, 0
    for start in range(0, len(trees), size):
        mine = trees[start : start + size]
        weights = leaf_weights(mine, config.algorithm.loss.aggregation)
        weighted = [
            WeightedTree(tree=tree, advantages=group_advantages([reward.score for reward in tree.rewards]), weights=tree_weights)
            for tree, tree_weights in zip(mine, weights, strict=True)
        ]
        unequal = [tree for tree in weighted if any(tree.advantages)]
        num_equal += len(weighted) - len(unequal)
        if not unequal and not loss.kl_coef:
            num_skipped += 1
            continue
        computed = weighted if loss.kl_coef or loss.entropy_advantage else unequal
        updates.append(schedule_trees(computed, placement, config.algorithm.attribution))
    return StepBatch(updates=tuple(updates), num_equal_groups=num_equal, num_skipped_updates=num_skipped)


def batch_metrics(batch: StepBatch) -> dict[str, float]:
    """`tokens_over_unique`: tokens computed for each token of the trees, forks and repeated prefixes included. `largest_to_mean`:
    how much longer the slowest rank or micro-batch of an update takes than the mean, by cost."""
    found = {"groups_equal": float(batch.num_equal_groups), "updates_skipped": float(batch.num_skipped_updates)}
    if not batch.updates:
        return found
    unique = sum(update.num_unique_tokens for update in batch.updates)
    return found | {
        "batch/tokens_over_unique": sum(update.num_tokens for update in batch.updates) / unique,
        "batch/parts": float(sum(update.num_parts for update in batch.updates)),
        "batch/largest_to_mean": max(update.largest_to_mean for update in batch.updates),
    }
