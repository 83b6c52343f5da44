"""Trees and rows -> micro-batches of every data-parallel rank, even by what they cost and equal in number.

The cost of a row is that of its tokens and of the keys they see. A tree that stands out is taken apart by leaves: the prefix that
is then computed twice is paid for by the ranks that no longer wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_arpo.batch.padding import FILLER
from megatron_arpo.batch.tree import Attribution, TreePart, WeightedTree, pack_row, tree_parts
from megatron_arpo.types import PackedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCost:
    """Floating-point operations, forward and backward, of a token and of a key that it sees."""

    per_token: float
    per_key: float

    def of(self, part: TreePart | PackedRow) -> float:
        num_tokens = part.num_tokens if isinstance(part, TreePart) else len(part)
        return self.per_token * num_tokens + self.per_key * part.num_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where micro-batches go. `multiple_of`: their number on a rank is a multiple of it. `even_micro_batches`: all of them should
    cost the same, since the `num_stages` of a pipeline or expert-parallel ranks wait for each; else only the ranks' totals should."""

    num_ranks: int
    max_row_tokens: int
    cost: RowCost
    multiple_of: int = 1
    num_stages: int = 1
    even_micro_batches: bool = False
    largest_to_mean: float = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`rows[d]`: micro-batches of data-parallel rank d. `largest_to_mean` is that of the costs that `Placement` evens out."""

    rows: tuple[tuple[PackedRow, ...], ...]
    num_tokens: int
    num_unique_tokens: int
    num_parts: int
    largest_to_mean: float


@dataclass(slots=True)
class _Bin:
    """A row while it fills."""

    parts: list[TreePart]
    num_tokens: int = 0
    cost: float = 0.0


def schedule_trees(trees: Sequence[WeightedTree], placement: Placement, attribution: Attribution) -> Schedule:
    """Raises ValueError where one trajectory alone is longer than a row, or there are no trees."""
    if not trees:
        raise ValueError("a batch needs at least one tree")
    parts = [part for tree in trees for part in tree_parts(tree, placement.max_row_tokens)]
    # more and smaller micro-batches than memory asks for pay where they keep the stages of a pipeline busy
    choices = (1, 2, 4, 8) if placement.num_stages > 1 else (1,)
    best = min((_deal_evenly(parts, placement, more_rows) for more_rows in choices), key=lambda one: one.time)
    return Schedule(
        rows=tuple(tuple(pack_row(one.parts, attribution) if one.parts else FILLER for one in rank) for rank in best.ranks),
        num_tokens=sum(one.num_tokens for rank in best.ranks for one in rank),
        num_unique_tokens=sum(len(segment.token_ids) for one in trees for segment in one.tree.segments),
        num_parts=sum(len(one.parts) for rank in best.ranks for one in rank),
        largest_to_mean=best.largest_to_mean,
    )


def _deal_evenly(parts: Sequence[TreePart], placement: Placement, more_rows: int) -> _Dealt:
    """Takes trees apart until the costs are even enough, or the repeated prefixes alone cost more than evenness can win. Returns
    the fastest that was found on the way."""
    found = best = _deal(parts, placement, more_rows)
    while found.largest_to_mean > placement.largest_to_mean and found.time_if_even < best.time * (1.0 + 1e-9):
        parts = _take_apart(parts, placement.cost)
        if parts is None:
            break
        found = _deal(parts, placement, more_rows)
        best = min(best, found, key=lambda one: one.time)
    return best


def _take_apart(parts: Sequence[TreePart], cost: RowCost) -> list[TreePart] | None:
    """The costliest parts that have several leaves cut where their halves are most even, one in sixteen at a time; None where every
    part has one leaf."""
    several = sorted((part for part in parts if len(part.leaf_indices) > 1), key=cost.of, reverse=True)
    if not several:
        return None
    chosen = several[: max(1, len(parts) // 16)]
    halves = [half for part in chosen for half in min(part.cuts(), key=lambda pair: max(map(cost.of, pair)))]
    return [part for part in parts if all(part is not one for one in chosen)] + halves


@dataclass(frozen=True, slots=True)
class _Dealt:
    """Rows of each rank, the costs that should be even, and how many of them run one after the other."""

    ranks: list[list[_Bin]]
    evened: list[float]
    in_a_row: int

    @property
    def time(self) -> float:
        return self.in_a_row * max(self.evened)

    @property
    def time_if_even(self) -> float:
        return self.in_a_row * sum(self.evened) / len(self.evened)

    @property
    def largest_to_mean(self) -> float:
        return self.time / self.time_if_even


def _deal(parts: Sequence[TreePart], placement: Placement, more_rows: int) -> _Dealt:
    """Costliest part first into the cheapest row that has room for it, with `more_rows` times as few rows as hold them all."""
    ordered = sorted(parts, key=placement.cost.of, reverse=True)
    step = placement.num_ranks * placement.multiple_of
    least = -(-sum(part.num_tokens for part in parts) // placement.max_row_tokens)
    num_rows = -(-least // step) * step * more_rows
    while (bins := _fill(ordered, num_rows, placement)) is None:
        num_rows += step
    ranks = _share_out(bins, placement.num_ranks)
    if placement.even_micro_batches:
        return _Dealt(ranks, [one.cost for rank in ranks for one in rank], len(ranks[0]) + placement.num_stages - 1)
    return _Dealt(ranks, [sum(one.cost for one in rank) for rank in ranks], 1)


def _fill(ordered: Sequence[TreePart], num_rows: int, placement: Placement) -> list[_Bin] | None:
    """None where they don't fit."""
    bins = [_Bin([]) for _ in range(num_rows)]
    queue = [(0.0, index) for index in range(num_rows)]
    for part in ordered:
        passed_over = []
        while queue and bins[queue[0][1]].num_tokens + part.num_tokens > placement.max_row_tokens:
            passed_over.append(heapq.heappop(queue))
        if not queue:
            return None
        _, index = queue[0]
        chosen = bins[index]
        chosen.parts.append(part)
        chosen.num_tokens += part.num_tokens
        chosen.cost += placement.cost.of(part)
        heapq.heapreplace(queue, (chosen.cost, index))
        for one in passed_over:
            heapq.heappush(queue, one)
    return bins


def _share_out(bins: Sequence[_Bin], num_ranks: int) -> list[list[_Bin]]:
    """The same number of rows to every rank, costliest first to the rank that has least and still lacks one."""
    rows_a_rank = len(bins) // num_ranks
    ranks: list[list[_Bin]] = [[] for _ in range(num_ranks)]
    for one in sorted(bins, key=lambda one: one.cost, reverse=True):
        min((rank for rank in ranks if len(rank) < rows_a_rank), key=lambda rank: sum(other.cost for other in rank)).append(one)
    return ranks


def assign_rows(rows: Sequence[PackedRow], num_ranks: int, multiple_of: int, cost: RowCost) -> list[list[PackedRow]]:
    """Rows of sequences, which can't be taken apart: costliest first onto the rank that has least; ranks with fewer rows are filled
    up with a one-token row of weight 0, to a multiple of `multiple_of`."""
    if not rows:
        raise ValueError("a batch needs at least one row")
    assigned: list[list[PackedRow]] = [[] for _ in range(num_ranks)]
    for row in sorted(rows, key=cost.of, reverse=True):
        min(assigned, key=lambda mine: sum(map(cost.of, mine))).append(row)
    num_micro_batches = -(-max(map(len, assigned)) // multiple_of) * multiple_of
    return [mine + [FILLER] * (num_micro_batches - len(mine)) for mine in assigned]
