"""Attention sees the ancestors of a token and nothing else: as runs, as FlexAttention's block mask, and in context-parallel slices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from megatron_arpo.actor.tree_mask import block_mask, plan_runs
from megatron_arpo.batch.context import BLOCKS_PER_RANK, context_slices
from megatron_arpo.batch.padding import pad_row
from megatron_arpo.types import NO_TARGET, PackedRow
from tests.unit.trees import random_tree, tree_rows


def padded_row(seed: int, multiple: int) -> PackedRow:
    trees = [random_tree(seed + index, prompt_id=str(index)) for index in range(2)]
    return pad_row(tree_rows(trees, "token-mean", "soft", 4096)[0], multiple)


def dense(row: PackedRow) -> torch.Tensor:
    """[query, key] by the definition."""
    length = len(row)
    end = torch.tensor(row.subtree_end)
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    return (key <= query) & (query < end[None])


def test_padding_is_seen_by_nobody_and_has_no_target() -> None:
    row, padded = padded_row(5, 1), padded_row(5, 64)
    assert len(padded) % 64 == 0 and padded.token_ids[: len(row)] == row.token_ids
    assert set(padded.targets[len(row) :]) == {NO_TARGET} and not any(padded.multiplicity[len(row) :])
    assert torch.equal(
        dense(padded)[len(row) :].nonzero(), torch.arange(len(row), len(padded))[:, None].expand(-1, 2) - torch.tensor([[len(row), 0]])
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), num_ranks=st.sampled_from([1, 2, 3, 4]))
def test_context_slices_cover_the_row_and_their_runs_see_the_same_keys(seed: int, num_ranks: int) -> None:
    row = padded_row(seed, num_ranks * BLOCKS_PER_RANK)
    slices = context_slices(row.positions, num_ranks)
    assert sorted(token for one in slices for start, end in one for token in range(start, end)) == list(range(len(row)))
    assert len({sum(end - start for start, end in one) for one in slices}) == 1
    expected = dense(row)
    for one in slices:
        mine = [token for start, end in one for token in range(start, end)]
        seen = torch.zeros(len(mine), len(row), dtype=torch.bool)
        for run in plan_runs(row.subtree_end, one):
            for query in range(run.start, run.end):
                place = run.first + query - run.start
                assert mine[place] == query
                for start, end in [*run.ancestor_ranges, (run.start, query + 1)]:
                    seen[place, start:end] = True
        assert torch.equal(seen, expected[mine])


def test_context_slices_are_even_in_attention() -> None:
    row_of_one_path = list(range(1024))
    costs = [sum(row_of_one_path[token] for start, end in one for token in range(start, end)) for one in context_slices(row_of_one_path, 4)]
    assert max(costs) - min(costs) == 0


def test_a_row_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 10 tokens can't be cut into 4 equal blocks"):
        context_slices(range(10), 2)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), num_ranks=st.sampled_from([1, 2]))
def test_block_mask_is_the_dense_mask(seed: int, num_ranks: int) -> None:
    block = 16
    row = padded_row(seed, block * num_ranks * BLOCKS_PER_RANK)
    end, expected = torch.tensor(row.subtree_end), dense(row)
    for one in context_slices(row.positions, num_ranks):
        mine = torch.cat([torch.arange(start, stop) for start, stop in one])
        mask = block_mask(end, mine, block)
        blocks = expected[mine].view(len(mine) // block, block, len(row) // block, block)
        found_any = torch.zeros(len(mine) // block, len(row) // block, dtype=torch.bool)
        found_full = torch.zeros_like(found_any)
        for query_block in range(len(found_any)):
            partly = mask.kv_indices[0, 0, query_block, : int(mask.kv_num_blocks[0, 0, query_block])].long()
            full = mask.full_kv_indices[0, 0, query_block, : int(mask.full_kv_num_blocks[0, 0, query_block])].long()
            found_any[query_block, partly] = found_any[query_block, full] = found_full[query_block, full] = True
        assert not (blocks.any(3).any(1) & ~found_any).any(), "a visible block is left out"
        assert torch.equal(found_full, blocks.all(3).all(1)), "full blocks are those that every query sees whole"
        query, key = torch.meshgrid(torch.arange(len(mine)), torch.arange(len(row)), indexing="ij")
        assert torch.equal(mask.mask_mod(torch.tensor(0), torch.tensor(0), query, key), expected[mine])


def test_flex_attention_with_the_block_mask_is_dense_attention() -> None:
    row = padded_row(11, 128)
    end = torch.tensor(row.subtree_end)
    query, key, value = (torch.randn(1, heads, len(row), 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    found = flex_attention(query, key, value, block_mask=block_mask(end, torch.arange(len(row))), enable_gqa=True)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=dense(row), enable_gqa=True)
    assert torch.allclose(found, expected, atol=1e-5)
