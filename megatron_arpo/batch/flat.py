"""Token sequences with a loss mask (demonstrations, sequences to score) -> packed rows of one-path trees."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_arpo.types import NO_TARGET, PackedRow


def pack_sequences(sequences: Sequence[tuple[Sequence[int], Sequence[int]]], token_weight: float, max_row_tokens: int) -> list[PackedRow]:
    """(token_ids, loss_mask) pairs -> rows in which every token with mask 1 is a target of weight `token_weight`.

    Raises ValueError where one sequence is longer than a row.
    """
    rows: list[dict[str, list]] = []
    for token_ids, loss_mask in sequences:
        length = len(token_ids)
        if length > max_row_tokens:
            raise ValueError(f"a sequence of {length} tokens exceeds actor.max_row_tokens={max_row_tokens}; raise it")
        if not rows or len(rows[-1]["token_ids"]) + length > max_row_tokens:
            rows.append({name: [] for name in PackedRow.__slots__})
        row = rows[-1]
        trained = [*(int(mask) for mask in loss_mask[1:]), 0]
        row["token_ids"].extend(token_ids)
        row["positions"].extend(range(length))
        row["subtree_end"].extend([len(row["token_ids"])] * length)
        row["targets"].extend([*token_ids[1:], NO_TARGET])
        row["weight"].extend(token_weight * mask for mask in trained)
        row["multiplicity"].extend(trained)
        for name in ("advantage_pos", "advantage_neg", "rollout_logprobs"):
            row[name].extend([0.0] * length)
    return [PackedRow(**{name: tuple(values) for name, values in row.items()}) for row in rows]
