"""Tokens that fill a row up: each a tree of its own, without a target, seen by nobody."""

from __future__ import annotations

from megatron_arpo.types import NO_TARGET, PackedRow


def _filling(number: int, start: int) -> PackedRow:
    """`number` tokens for a row that has `start` before them."""
    zeros = dict.fromkeys(PackedRow.__slots__, (0,) * number)
    return PackedRow.of(**{**zeros, "subtree_end": range(start + 1, start + number + 1), "targets": (NO_TARGET,) * number})


def pad_row(row: PackedRow, multiple: int) -> PackedRow:
    """`row` with as many filling tokens behind it as make its length a multiple."""
    missing = -len(row) % multiple
    if not missing:
        return row
    filling = _filling(missing, len(row))
    return PackedRow(**{name: getattr(row, name) + getattr(filling, name) for name in PackedRow.__slots__})


FILLER = _filling(1, 0)
"""A micro-batch of one filling token, for a rank that would otherwise run one less than the others."""
