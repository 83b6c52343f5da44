"""What a step's rollout trees say in numbers: reward, forks, tool calls, lengths, entropy. Pure; the run logs them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import get_args

from megatron_arpo.types import FinishReason, RolloutTree, Segment


def rollout_metrics(trees: Sequence[RolloutTree]) -> dict[str, float]:
    """Means and shares over all trajectories (leaves) of `trees`; the reward's only where every tree is scored.

    - `unique_tokens` counts each token of the trees once, prompts included, `flat_tokens` once per trajectory through
      it: the work of the actor with and without shared prefixes.
    - `entropy_mean` is in nats over the tokens the model wrote, each counted once; none is off by more than
      `entropy_error_max`.
    - `equal_reward_groups` is the share of trees whose leaves all score the same: they teach nothing.
    - `reward_std` is the spread over all leaves of the step (population).

    Example: one tree of two leaves with rewards 1 and 0 has reward_mean 0.5, reward_std 0.5, equal_reward_groups 0.
    """
    if not trees:
        raise ValueError("rollout_metrics needs at least one tree")
    paths = [tree.path(leaf_id) for tree in trees for leaf_id in tree.leaf_ids]
    model_segments = [segment for tree in trees for segment in tree.model_segments()]
    decisions = [segment.decision for segment in model_segments if segment.decision is not None]
    unique_tokens = sum(len(segment.token_ids) for tree in trees for segment in tree.segments)
    flat_tokens = sum(_num_tokens(path) for path in paths)
    entropies = [entropy for segment in model_segments for entropy in segment.entropies]
    metrics: dict[str, float] = {
        "num_trees": len(trees),
        "num_leaves": len(paths),
        "num_forks": sum(decision.num_forks for decision in decisions),
        "num_fork_decisions": len(decisions),
        "tool_calls_per_trajectory": statistics.fmean(_num_tool_calls(path) for path in paths),
        "response_tokens_mean": statistics.fmean(_num_tokens(path[1:]) for path in paths),
        "unique_tokens": unique_tokens,
        "flat_tokens": flat_tokens,
        "flat_over_unique_tokens": flat_tokens / unique_tokens,
        "entropy_mean": statistics.fmean(entropies),
        "entropy_error_max": max(segment.max_entropy_error for segment in model_segments),
    }
    for reason in get_args(FinishReason):
        if reason != "tool_call":
            metrics[f"finish_{reason}"] = statistics.fmean(path[-1].finish_reason == reason for path in paths)
    return metrics | _reward_metrics(trees)


def _reward_metrics(trees: Sequence[RolloutTree]) -> dict[str, float]:
    if not all(tree.rewards for tree in trees):
        return {}
    groups = [[reward.score for reward in tree.rewards] for tree in trees]
    scores = [score for group in groups for score in group]
    return {
        "reward_mean": statistics.fmean(scores),
        "reward_std": statistics.pstdev(scores),
        "equal_reward_groups": statistics.fmean(len(set(group)) == 1 for group in groups),
    }


def _num_tokens(path: Sequence[Segment]) -> int:
    return sum(len(segment.token_ids) for segment in path)


def _num_tool_calls(path: Sequence[Segment]) -> int:
    """Calls that were made on a path, that whose result did not fit included."""
    return sum(segment.tool_call is not None for segment in path)
