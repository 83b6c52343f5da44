"""Rows -> data-parallel ranks, as evenly as their cost allows, with equal numbers of micro-batches on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_arpo.types import NO_TARGET, PackedRow

_FILLER = PackedRow(
    token_ids=(0,),
    positions=(0,),
    subtree_end=(1,),
    targets=(NO_TARGET,),
    advantage_pos=(0.0,),
    advantage_neg=(0.0,),
    weight=(0.0,),
    multiplicity=(0,),
    rollout_logprobs=(0.0,),
)
"""One token without a target, for a rank that would otherwise run a micro-batch less than the others."""


def assign_rows(rows: Sequence[PackedRow], num_ranks: int) -> list[list[PackedRow]]:
    """Longest first onto the least loaded rank; ranks with fewer rows are filled up with a one-token row of weight 0."""
    if not rows:
        raise ValueError("a batch needs at least one row")
    assigned: list[list[PackedRow]] = [[] for _ in range(num_ranks)]
    for row in sorted(rows, key=len, reverse=True):
        min(assigned, key=lambda mine: sum(map(len, mine))).append(row)
    num_micro_batches = max(map(len, assigned))
    return [mine + [_FILLER] * (num_micro_batches - len(mine)) for mine in assigned]
