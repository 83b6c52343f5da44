"""Rewards of a tree's leaves -> advantages, and their attribution to the tokens that several leaves share.

An advantage is constant along its trajectory, so everything a token needs is a sum over the leaves below its segment.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_arpo.types import RolloutTree

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
_STD_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float]) -> tuple[float, ...]:
    """A_i = (r_i - mean) / (std + 1e-6) over the leaves of one tree, unbiased std (GRPO, arXiv 2402.03300, sec. 4.1.2; the
    epsilon as in the published ARPO code). Equal rewards give zeros. Fewer than two leaves raise ValueError."""
    if len(rewards) < 2:
        raise ValueError(f"a group advantage needs at least 2 rewards, got {len(rewards)}; raise num_rollouts")
    if max(rewards) == min(rewards):
        return (0.0,) * len(rewards)
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    return tuple((reward - mean) / (std + _STD_EPSILON) for reward in rewards)


def trained_tokens(tree: RolloutTree) -> tuple[int, ...]:
    """Model tokens on the path of each leaf: its length in the loss."""
    return tuple(sum(len(segment.token_ids) for segment in tree.path(leaf_id) if segment.kind == "model") for leaf_id in tree.leaf_ids)


def leaf_weights(trees: Sequence[RolloutTree], aggregation: Aggregation) -> list[tuple[float, ...]]:
    """w_i of every leaf, the denominator of the flat mini-batch included, so that the loss is a plain sum over tokens.

    token-mean divides by the leaves' trained tokens with multiplicity; seq-mean-token-mean by the number of leaves and each
    leaf's own length; seq-mean-token-sum by the number of leaves. `trees` must be the whole mini-batch, over all ranks.
    """
    lengths = [trained_tokens(tree) for tree in trees]
    num_leaves = sum(len(tree_lengths) for tree_lengths in lengths)
    num_tokens = sum(sum(tree_lengths) for tree_lengths in lengths)
    match aggregation:
        case "token-mean":
            return [(1.0 / num_tokens,) * len(tree_lengths) for tree_lengths in lengths]
        case "seq-mean-token-mean":
            return [tuple(1.0 / (num_leaves * length) for length in tree_lengths) for tree_lengths in lengths]
        case "seq-mean-token-sum":
            return [(1.0 / num_leaves,) * len(tree_lengths) for tree_lengths in lengths]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAdvantage:
    """What the tokens of one segment carry: sum w_i max(A_i, 0), sum w_i min(A_i, 0), sum w_i, number of leaves.

    For a ratio r that all leaves share, sum_i w_i l(r, A_i) = l(r, positive) + l(r, negative), since l is positively
    homogeneous in A on each sign.
    """

    positive: float
    negative: float
    weight: float
    num_leaves: int


def attribute(
    tree: RolloutTree,
    advantages: Sequence[float],
    weights: Sequence[float],
    attribution: Literal["soft", "hard"],
    leaf_indices: Sequence[int],
) -> Mapping[int, SharedAdvantage]:
    """Segment id -> what its tokens carry from the leaves `leaf_indices`; sums over a partition of the leaves add up.

    soft: each leaf keeps its advantage on its whole path. hard: a shared token has the mean advantage of *all* leaves of the
    tree that pass through it (arXiv 2507.19849, sec. 3.2).
    """
    through: dict[int, list[int]] = {}
    for index, leaf_id in enumerate(tree.leaf_ids):
        for segment in tree.path(leaf_id):
            through.setdefault(segment.segment_id, []).append(index)
    chosen = set(leaf_indices)
    found: dict[int, SharedAdvantage] = {}
    for segment_id, leaves in through.items():
        mine = [index for index in leaves if index in chosen]
        if not mine:
            continue
        shared_mean = statistics.fmean(advantages[index] for index in leaves)
        values = {index: advantages[index] if attribution == "soft" else shared_mean for index in mine}
        found[segment_id] = SharedAdvantage(
            positive=sum(weights[index] * max(value, 0.0) for index, value in values.items()),
            negative=sum(weights[index] * min(value, 0.0) for index, value in values.items()),
            weight=sum(weights[index] for index in mine),
            num_leaves=len(mine),
        )
    return found
