"""Rows are dealt out evenly by what they cost, in equal numbers, and nothing is lost on the way."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_arpo.algorithm.advantage import group_advantages, leaf_weights
from megatron_arpo.batch.padding import FILLER
from megatron_arpo.batch.schedule import Placement, RowCost, assign_rows, schedule_trees
from megatron_arpo.batch.tree import TreePart, WeightedTree, tree_parts
from tests.unit.test_tree_batch import assert_same_pairs, pairs_of_leaves, pairs_of_rows
from tests.unit.trees import random_tree

COST = RowCost(per_token=1.0, per_key=0.05)


def weighted(seeds: range) -> list[WeightedTree]:
    trees = [random_tree(seed, prompt_id=str(seed)) for seed in seeds]
    weights = leaf_weights(trees, "token-mean")
    return [
        WeightedTree(tree=tree, advantages=group_advantages([reward.score for reward in tree.rewards]), weights=tree_weights)
        for tree, tree_weights in zip(trees, weights, strict=True)
    ]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), num_ranks=st.integers(1, 4), multiple_of=st.integers(1, 3), even=st.booleans(), limit=st.integers(64, 300)
)
def test_every_pair_is_there_once_whatever_the_placement(seed: int, num_ranks: int, multiple_of: int, even: bool, limit: int) -> None:
    trees = weighted(range(seed, seed + 3))
    placement = Placement(num_ranks=num_ranks, max_row_tokens=limit, cost=COST, multiple_of=multiple_of, even_micro_batches=even)
    schedule = schedule_trees(trees, placement, "soft")
    rows = [row for rank in schedule.rows for row in rank]
    assert len({len(rank) for rank in schedule.rows}) == 1 and len(schedule.rows[0]) % multiple_of == 0
    assert all(len(row) <= limit for row in rows)
    assert sum(len(row) for row in rows if row is not FILLER) == schedule.num_tokens
    for one in trees:
        # prompts are short and random: trees may share a pair by chance, so each is looked at alone
        alone = schedule_trees([one], placement, "soft")
        assert_same_pairs(pairs_of_rows([row for rank in alone.rows for row in rank]), pairs_of_leaves(one))
    assert sum(sum(row.weight) for row in rows) == pytest.approx(
        sum(sum(values[2] for values in pairs_of_leaves(one).values()) for one in trees)
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_tokens_and_keys_of_a_part_are_those_of_its_row(seed: int) -> None:
    from megatron_arpo.batch.tree import pack_row

    (tree,) = weighted(range(seed, seed + 1))
    for part in [*tree_parts(tree, 60), *(half for pair in TreePart(tree, tuple(range(len(tree.weights)))).cuts() for half in pair)]:
        row = pack_row([part], "soft")
        assert (part.num_tokens, part.num_keys) == (len(row), row.num_keys)
        assert row.num_keys == sum(sum(1 for key in range(query + 1) if query < row.subtree_end[key]) for query in range(len(row)))


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_costs_are_even(num_ranks: int, even: bool) -> None:
    trees = weighted(range(100, 124))
    placement = Placement(num_ranks=num_ranks, max_row_tokens=400, cost=COST, even_micro_batches=even)
    assert schedule_trees(trees, placement, "soft").largest_to_mean <= 1.1


def test_one_rank_takes_no_tree_apart() -> None:
    trees = weighted(range(8))
    schedule = schedule_trees(trees, Placement(num_ranks=1, max_row_tokens=10_000, cost=COST), "soft")
    assert schedule.num_parts == len(trees) and schedule.largest_to_mean == 1.0


def test_one_trajectory_cannot_be_taken_apart() -> None:
    tree = weighted(range(1))[0]
    leaf = TreePart(tree, (0,))
    assert list(leaf.cuts()) == []


def test_assigned_rows_are_filled_up() -> None:
    from megatron_arpo.batch.flat import pack_sequences

    draw = random.Random(1)
    rows = pack_sequences([(ids, [1] * len(ids)) for ids in ([1] * draw.randint(26, 50) for _ in range(9))], 1.0, 50)
    ranks = assign_rows(rows, 2, 3, COST)
    assert [len(rank) for rank in ranks] == [6, 6]
    assert sum(row is FILLER for rank in ranks for row in rank) == 12 - len(rows)
    with pytest.raises(ValueError, match="at least one row"):
        assign_rows([], 2, 1, COST)
