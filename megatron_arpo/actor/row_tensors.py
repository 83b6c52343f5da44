"""Packed rows -> tensors on the device: the slice of a row that this context-parallel rank computes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from megatron_arpo.actor.attention import TreeRowShape
from megatron_arpo.actor.device import current_device, on_cuda
from megatron_arpo.actor.tree_mask import Ranges, block_mask, plan_runs
from megatron_arpo.batch.context import context_slices
from megatron_arpo.batch.padding import pad_row
from megatron_arpo.types import PackedRow


@dataclass(frozen=True, slots=True)
class RowTensors:
    """`trained_N` are the places among this rank's Q tokens whose target is in the loss; the other _N fields run along them.
    `target_index_N` counts the targets of the whole row, `num_targets` of them. The log-probs of the policy before the update and
    of the reference are filled in on the last pipeline stage, where they are needed."""

    token_ids_1Q: torch.Tensor
    positions_Q: torch.Tensor
    shape: TreeRowShape
    num_tokens: int
    trained_N: torch.Tensor
    targets_N: torch.Tensor
    advantage_pos_N: torch.Tensor
    advantage_neg_N: torch.Tensor
    weight_N: torch.Tensor
    multiplicity_N: torch.Tensor
    rollout_logprobs_N: torch.Tensor
    target_index_N: torch.Tensor
    num_targets: int
    old_logprobs_N: torch.Tensor | None = None
    reference_logprobs_N: torch.Tensor | None = None


def row_tensors(row: PackedRow, slice_multiple: int) -> RowTensors:
    """`slice_multiple` as actor/layout.py gives it; the row is padded to it on every context-parallel rank."""
    device, num_ranks = current_device(), parallel_state.get_context_parallel_world_size()
    row = pad_row(row, slice_multiple * num_ranks)
    slices = context_slices(row.positions, num_ranks) if num_ranks > 1 else [((0, len(row)),)]
    mine = slices[parallel_state.get_context_parallel_rank()]
    mine_Q = _indices(mine).to(device)
    multiplicity_T = _tensor(row.multiplicity).to(device)
    target_count_T = (multiplicity_T > 0).cumsum(0)
    trained_N = multiplicity_T[mine_Q].nonzero()[:, 0]
    place_N = mine_Q[trained_N]

    def along_trained(values: array[float]) -> torch.Tensor:
        return _tensor(values).float().to(device)[place_N]

    return RowTensors(
        token_ids_1Q=_tensor(row.token_ids).long().to(device)[mine_Q][None],
        positions_Q=_tensor(row.positions).to(device)[mine_Q],
        shape=_shape(row.subtree_end, mine, mine_Q, slices, device),
        num_tokens=len(row),
        trained_N=trained_N,
        targets_N=_tensor(row.targets).long().to(device)[place_N],
        advantage_pos_N=along_trained(row.advantage_pos),
        advantage_neg_N=along_trained(row.advantage_neg),
        weight_N=along_trained(row.weight),
        multiplicity_N=multiplicity_T[place_N].float(),
        rollout_logprobs_N=along_trained(row.rollout_logprobs),
        target_index_N=target_count_T[place_N] - 1,
        num_targets=int(target_count_T[-1]),
    )


def _shape(subtree_end: Sequence[int], mine: Ranges, mine_Q: torch.Tensor, slices: Sequence[Ranges], device: torch.device) -> TreeRowShape:
    row_order_T = None
    if len(slices) > 1:
        row_order_T = torch.cat([_indices(one) for one in slices]).argsort().to(device)
    if on_cuda():
        return TreeRowShape((), block_mask(_tensor(subtree_end).to(device), mine_Q), row_order_T)
    return TreeRowShape(plan_runs(subtree_end, mine if len(slices) > 1 else None), None, row_order_T)


def _tensor(values: array) -> torch.Tensor:
    """A view of the array's memory."""
    return torch.frombuffer(values, dtype=torch.int32 if values.typecode == "i" else torch.float64)


def _indices(ranges: Ranges) -> torch.Tensor:
    return torch.cat([torch.arange(start, end) for start, end in ranges])
