"""Packed rows: every (token, successor) pair of every leaf is there, with the advantages of the leaves through it."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_arpo.actor.tree_mask import plan_runs
from megatron_arpo.batch.schedule import Placement, RowCost, schedule_trees
from megatron_arpo.batch.tree import WeightedTree
from megatron_arpo.types import NO_TARGET, PackedRow, RolloutTree
from tests.unit.trees import flat_trees, random_tree, segment, tree_of


def pack(trees: list[WeightedTree], max_row_tokens: int, attribution: str = "soft") -> list[PackedRow]:
    placement = Placement(num_ranks=1, max_row_tokens=max_row_tokens, cost=RowCost(per_token=1.0, per_key=0.01))
    return list(schedule_trees(trees, placement, attribution).rows[0])


def weighted(tree: RolloutTree, advantages=None, weights=None) -> WeightedTree:
    number = len(tree.leaf_ids)
    return WeightedTree(
        tree=tree,
        advantages=tuple(advantages or [(-1.0) ** index * (index + 1) for index in range(number)]),
        weights=tuple(weights or [1.0 / (index + 2) for index in range(number)]),
    )


def visible(row: PackedRow, query: int) -> list[int]:
    return [key for key in range(query + 1) if query < row.subtree_end[key]]


def pairs_of_rows(rows: list[PackedRow]) -> dict[tuple, list[float]]:
    """(tokens of the visible prefix, target) -> [A+, A-, weight, multiplicity], trained targets only."""
    found: dict[tuple, list[float]] = {}
    for row in rows:
        for query, target in enumerate(row.targets):
            if target == NO_TARGET or not row.multiplicity[query]:
                continue
            prefix = tuple(row.token_ids[key] for key in visible(row, query))
            sums = found.setdefault((prefix, target), [0.0, 0.0, 0.0, 0.0])
            for index, name in enumerate(("advantage_pos", "advantage_neg", "weight", "multiplicity")):
                sums[index] += getattr(row, name)[query]
    return found


def pairs_of_leaves(one: WeightedTree) -> dict[tuple, list[float]]:
    """The same, straight from the flat batch."""
    found: dict[tuple, list[float]] = {}
    for leaf_id, advantage, weight in zip(one.tree.leaf_ids, one.advantages, one.weights, strict=True):
        tokens, trained = [], []
        for part in one.tree.path(leaf_id):
            tokens.extend(part.token_ids)
            trained.extend([part.kind == "model"] * len(part.token_ids))
        for index in range(1, len(tokens)):
            if trained[index]:
                sums = found.setdefault((tuple(tokens[:index]), tokens[index]), [0.0, 0.0, 0.0, 0.0])
                for position, value in enumerate((weight * max(advantage, 0), weight * min(advantage, 0), weight, 1.0)):
                    sums[position] += value
    return found


def assert_same_pairs(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for key, sums in expected.items():
        assert found[key] == pytest.approx(sums), key


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), limit=st.integers(32, 400))
def test_rows_hold_exactly_the_pairs_of_the_flat_batch(seed: int, limit: int) -> None:
    one = weighted(random_tree(seed))
    rows = pack([one], limit)
    assert all(len(row) <= limit for row in rows)
    assert_same_pairs(pairs_of_rows(rows), pairs_of_leaves(one))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_number_of_targets_is_that_of_the_flat_batch(seed: int) -> None:
    tree = random_tree(seed)
    flat_count = sum(len(part.token_ids) for leaf in tree.leaf_ids for part in tree.path(leaf) if part.kind == "model")
    rows = pack([weighted(tree)], 4096)
    assert sum(sum(row.multiplicity) for row in rows) == flat_count
    extra = sum(max(0, len(children) - 1) for children in tree.children().values())
    assert sum(map(len, rows)) == sum(len(part.token_ids) for part in tree.segments) + extra


def test_documented_example() -> None:
    tree = tree_of([segment(0, -1, "prompt", (1, 2)), segment(1, 0, "model", (3,)), segment(2, 0, "model", (4,))])
    (row,) = pack([weighted(tree, [1.0, -1.0], [0.5, 0.5])], 100)
    assert tuple(row.token_ids) == (1, 2, 3, 2, 4)
    assert tuple(row.positions) == (0, 1, 2, 1, 2)
    assert tuple(row.subtree_end) == (5, 3, 3, 5, 5)
    assert tuple(row.targets) == (2, 3, NO_TARGET, 4, NO_TARGET)
    assert tuple(row.advantage_pos) == (0.0, 0.5, 0.0, 0.0, 0.0)
    assert tuple(row.advantage_neg) == (0.0, 0.0, 0.0, -0.5, 0.0)


def test_several_trees_share_a_row_without_seeing_each_other() -> None:
    trees = [random_tree(seed, prompt_id=str(seed)) for seed in range(4)]
    (row,) = pack([weighted(tree) for tree in trees], 4096)
    starts = [query for query in range(len(row)) if visible(row, query) == [query]]
    for first, then in itertools.pairwise(starts):
        assert all(end <= then for end in row.subtree_end[first:then])


def test_positions_are_depths() -> None:
    for row in pack([weighted(random_tree(7))], 4096):
        assert all(position == len(visible(row, query)) - 1 for query, position in enumerate(row.positions))


def test_hard_attribution_gives_shared_tokens_the_mean() -> None:
    tree = tree_of(
        [segment(0, -1, "prompt", (1,)), segment(1, 0, "model", (2, 3)), segment(2, 1, "tool", (4,)),
         segment(3, 2, "model", (5,)), segment(4, 2, "model", (6,))]
    )  # fmt: skip
    (row,) = pack([weighted(tree, [1.0, -0.5], [0.1, 0.1])], 100, "hard")
    shared = row.targets.index(3)
    assert row.advantage_pos[shared] == pytest.approx(0.2 * 0.25)
    assert row.advantage_neg[shared] == 0.0
    (soft,) = pack([weighted(tree, [1.0, -0.5], [0.1, 0.1])], 100, "soft")
    assert (soft.advantage_pos[shared], soft.advantage_neg[shared]) == pytest.approx((0.1, -0.05))


def test_one_trajectory_too_long_for_a_row_is_refused() -> None:
    tree = tree_of([segment(0, -1, "prompt", (1,) * 10), segment(1, 0, "model", (2,) * 10)])
    with pytest.raises(ValueError, match=r"20 tokens exceeds actor.max_row_tokens=19"):
        pack([weighted(tree, [1.0], [1.0])], 19)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_attention_runs_see_exactly_the_visible_keys(seed: int) -> None:
    rows = pack([weighted(random_tree(seed)), *(weighted(flat) for flat in flat_trees(random_tree(seed + 1)))], 4096)
    for row in rows:
        runs = plan_runs(list(row.subtree_end))
        assert [run.start for run in runs][1:] == [run.end for run in runs][:-1]
        for run in runs:
            ancestors = [key for start, end in run.ancestor_ranges for key in range(start, end)]
            for query in range(run.start, run.end):
                assert [*ancestors, *range(run.start, query + 1)] == visible(row, query)


def test_unique_pairs_are_computed_once() -> None:
    rows = pack([weighted(random_tree(3))], 4096)
    counts = Counter(
        (tuple(row.token_ids[key] for key in visible(row, query)), row.targets[query])
        for row in rows for query in range(len(row)) if row.multiplicity[query]
    )  # fmt: skip
    duplicates = [pair for pair, count in counts.items() if count > 1]
    flat = [pair for pair in pairs_of_leaves(weighted(random_tree(3)))]
    assert len(flat) == len(counts) and len(duplicates) <= 1  # two branches may draw the same token by chance
