"""Two lazy tensors, compared a block at a time."""

from __future__ import annotations

import torch

from megatron_arpo.weights.lazy_tensor import LazyTensor, num_columns, num_rows, rows_in_block


def largest_difference(one: LazyTensor, other: LazyTensor) -> float | None:
    """None where all bytes are equal; else the largest absolute difference, NaN where one has a NaN and the other has not. Shapes must
    be equal; tensors of two dtypes are never equal, and compared by value."""
    largest = None if one.dtype == other.dtype else 0.0
    step = min(rows_in_block(one), rows_in_block(other))
    for start in range(0, num_rows(one), step):
        blocks = []
        for tensor in (one, other):
            rows = torch.empty((min(step, num_rows(one) - start), num_columns(one)), dtype=tensor.dtype)
            tensor.read_rows(start, rows)
            blocks.append(rows)
        if one.dtype == other.dtype and torch.equal(*(rows.view(torch.uint8) for rows in blocks)):
            continue
        found = float((blocks[0].double() - blocks[1].double()).abs().max())
        largest = found if largest is None or not found <= largest else largest
    return largest
