from __future__ import annotations

import math

import pytest

from megatron_arpo.algorithm.advantage import attribute, group_advantages, leaf_weights, trained_tokens
from tests.unit.trees import random_tree, segment, tree_of


def test_group_advantages_by_hand() -> None:
    # mean 0.5, unbiased std sqrt(1/3 * 4 * 0.25) = 0.57735
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert group_advantages([1.0, 0.0, 1.0, 0.0]) == pytest.approx([expected, -expected, expected, -expected])


def test_equal_rewards_have_no_advantage() -> None:
    assert group_advantages([0.3, 0.3, 0.3]) == (0.0, 0.0, 0.0)


def test_one_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="num_rollouts"):
        group_advantages([1.0])


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_leaf_weights_are_those_of_the_flat_batch(aggregation: str) -> None:
    trees = [random_tree(seed) for seed in (1, 2, 3)]
    lengths = [length for tree in trees for length in trained_tokens(tree)]
    values = [0.3 * index - 1 for index in range(len(lengths))]  # the loss of each leaf's tokens, constant within it
    flat = {
        "token-mean": sum(v * n for v, n in zip(values, lengths, strict=True)) / sum(lengths),
        "seq-mean-token-mean": sum(values) / len(values),
        "seq-mean-token-sum": sum(v * n for v, n in zip(values, lengths, strict=True)) / len(values),
    }[aggregation]
    weights = [weight for tree in leaf_weights(trees, aggregation) for weight in tree]
    assert sum(v * n * w for v, n, w in zip(values, lengths, weights, strict=True)) == pytest.approx(flat)


def test_attribution_over_a_partition_of_leaves_adds_up() -> None:
    tree = random_tree(11, num_initial=4)
    number = len(tree.leaf_ids)
    advantages, weights = [(-1.0) ** i * i for i in range(number)], [1.0 / (i + 1) for i in range(number)]
    for attribution in ("soft", "hard"):
        whole = attribute(tree, advantages, weights, attribution, range(number))
        parts = [attribute(tree, advantages, weights, attribution, part) for part in (range(0, 2), range(2, number))]
        for segment_id, expected in whole.items():
            found = [part[segment_id] for part in parts if segment_id in part]
            assert sum(one.positive for one in found) == pytest.approx(expected.positive)
            assert sum(one.negative for one in found) == pytest.approx(expected.negative)
            assert sum(one.num_leaves for one in found) == expected.num_leaves


def test_segments_need_tokens() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        tree_of([segment(0, -1, "prompt", ())])
