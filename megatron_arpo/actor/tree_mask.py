"""Who sees whom in a packed row: query q sees key k iff k <= q < subtree_end[k].

On CPU as runs of queries that share their ancestors, on GPU as a block mask for FlexAttention. A context-parallel rank has
slices of the row's queries and all of its keys. Suffixes: T tokens of the row, Q queries on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask

Ranges = tuple[tuple[int, int], ...]
"""Ascending [start, end) of a row."""


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Queries [start, end) of the row that lie on one path, with the key ranges they all see before `start`; `first` is the
    place of the first of them among this rank's queries."""

    start: int
    end: int
    ancestor_ranges: Ranges
    first: int


def plan_runs(subtree_end: Sequence[int], slices: Ranges | None = None) -> tuple[QueryRun, ...]:
    """Row shape [T] -> the runs of a rank that holds the queries of `slices` (all where None).

    Example: subtree_end [6, 6, 4, 4, 6, 6] (a stem of two, a child of two, another child of two) gives runs [0,2) with no
    ancestors, [2,4) and [4,6) each with ancestors [0,2).
    """
    whole = _plan_whole(subtree_end)
    if slices is None:
        return whole
    runs: list[QueryRun] = []
    first = 0
    for start, end in slices:
        for run in whole:
            low, high = max(start, run.start), min(end, run.end)
            if low < high:
                before = merged([*run.ancestor_ranges, (run.start, low)]) if low > run.start else run.ancestor_ranges
                runs.append(QueryRun(low, high, before, first + low - start))
        first += end - start
    return tuple(runs)


def _plan_whole(subtree_end: Sequence[int]) -> tuple[QueryRun, ...]:
    runs: list[QueryRun] = []
    open_ranges: list[tuple[int, int]] = []  # the path from the root to here; each ends where its subtree may not
    start = 0
    while start < len(subtree_end):
        end = start + 1
        while end < len(subtree_end) and subtree_end[end] == subtree_end[start] and end < subtree_end[start]:
            end += 1
        while open_ranges and subtree_end[open_ranges[-1][0]] <= start:
            open_ranges.pop()
        runs.append(QueryRun(start, end, merged(open_ranges), start))
        open_ranges.append((start, end))
        start = end
    return tuple(runs)


def merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Neighbouring ranges joined."""
    found: list[tuple[int, int]] = []
    for start, end in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return tuple(found)


def block_mask(subtree_end_T: torch.Tensor, queries_Q: torch.Tensor, block_size: int = 128) -> BlockMask:
    """FlexAttention's mask for the queries at rows `queries_Q` over all T keys. T and Q are multiples of `block_size`.

    Whether a block of keys is seen by a block of queries in full, in part or not at all follows from the least and the
    greatest subtree_end in it, so the mask costs (T / block_size)^2 comparisons and no token pair is looked at here.
    """
    first_query, last_query = queries_Q.view(-1, block_size).aminmax(dim=1)
    least_end, greatest_end = subtree_end_T.view(-1, block_size).aminmax(dim=1)
    first_key = torch.arange(0, len(subtree_end_T), block_size, device=subtree_end_T.device)
    last_key = first_key + block_size - 1
    full = (last_key[None] <= first_query[:, None]) & (last_query[:, None] < least_end[None])
    partly = (first_key[None] <= last_query[:, None]) & (first_query[:, None] < greatest_end[None]) & ~full

    def visible(_batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        row_of_query = queries_Q[query]
        return (key <= row_of_query) & (row_of_query < subtree_end_T[key])

    lengths = (len(queries_Q), len(subtree_end_T))
    return BlockMask.from_kv_blocks(
        *_block_lists(partly), *_block_lists(full), BLOCK_SIZE=block_size, mask_mod=visible, seq_lengths=lengths
    )


def _block_lists(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[query blocks, key blocks] -> how many a query block has [1, 1, query blocks], and which, those first [1, 1, ...]."""
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None].contiguous()
