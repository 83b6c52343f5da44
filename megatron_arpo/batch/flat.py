"""Token sequences with a loss mask (demonstrations, sequences to score) -> packed rows of one-path trees."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from megatron_arpo.types import NO_TARGET, PackedRow


def pack_sequences(sequences: Sequence[tuple[Sequence[int], Sequence[int]]], token_weight: float, max_row_tokens: int) -> list[PackedRow]:
    """(token_ids, loss_mask) pairs -> rows in which every token with mask 1 is a target of weight `token_weight`.

    Raises ValueError where one sequence is longer than a row.
    """
    rows: list[PackedRow] = []
    for token_ids, loss_mask in sequences:
        length = len(token_ids)
        if length > max_row_tokens:
            raise ValueError(f"a sequence of {length} tokens exceeds actor.max_row_tokens={max_row_tokens}; raise it")
        if not rows or len(rows[-1]) + length > max_row_tokens:
            rows.append(PackedRow.empty())
        row = rows[-1]
        trained = array("i", loss_mask)[1:] + array("i", [0])
        nothing = array("d", [0.0]) * length
        row.token_ids.extend(token_ids)
        row.positions.extend(range(length))
        row.subtree_end.extend(array("i", [len(row)]) * length)
        row.targets.extend((*token_ids[1:], NO_TARGET))
        row.weight.extend(token_weight * mask for mask in trained)
        row.multiplicity.extend(trained)
        row.advantage_pos.extend(nothing)
        row.advantage_neg.extend(nothing)
        row.rollout_logprobs.extend(nothing)
    return rows
