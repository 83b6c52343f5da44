"""Packed rows through the Megatron model: log-probs and entropies of the targets, and Megatron's pipeline schedules around them.

Suffixes: T tokens of the row, N targets among them, V vocabulary on this tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

from megatron_arpo.actor.attention import QueryRun, TreeRowParams, plan_runs
from megatron_arpo.actor.device import current_device
from megatron_arpo.actor.model import unwrap
from megatron_arpo.types import PackedRow


@dataclass(frozen=True, slots=True)
class RowTensors:
    """A packed row on the device. `trained_N` are the positions whose target is in the loss; the other fields run along them."""

    token_ids_1T: torch.Tensor
    positions_T: torch.Tensor
    runs: tuple[QueryRun, ...]
    trained_N: torch.Tensor
    targets_N: torch.Tensor
    advantage_pos_N: torch.Tensor
    advantage_neg_N: torch.Tensor
    weight_N: torch.Tensor
    multiplicity_N: torch.Tensor
    rollout_logprobs_N: torch.Tensor


def row_tensors(row: PackedRow) -> RowTensors:
    device = current_device()
    multiplicity_T = torch.tensor(row.multiplicity, device=device)
    trained_N = multiplicity_T.nonzero()[:, 0]

    def along_trained(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[trained_N]

    return RowTensors(
        token_ids_1T=torch.tensor([row.token_ids], device=device),
        positions_T=torch.tensor(row.positions, device=device),
        runs=plan_runs(list(row.subtree_end)),
        trained_N=trained_N,
        targets_N=torch.tensor(row.targets, device=device)[trained_N],
        advantage_pos_N=along_trained(row.advantage_pos),
        advantage_neg_N=along_trained(row.advantage_neg),
        weight_N=along_trained(row.weight),
        multiplicity_N=multiplicity_T[trained_N].float(),
        rollout_logprobs_N=along_trained(row.rollout_logprobs),
    )


def target_logprobs(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, vocab_size: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob [N] of each target (with gradient) and entropy [N] in nats (without), over the vocabulary of all tensor-parallel
    ranks at `temperature`. Padded vocabulary rows, at and behind `vocab_size`, get no probability."""
    group = parallel_state.get_tensor_model_parallel_group()
    num_local = logits_NV.shape[-1]
    first = num_local * parallel_state.get_tensor_model_parallel_rank()
    scaled_NV = logits_NV.float() / temperature
    if first + num_local > vocab_size:
        scaled_NV = scaled_NV[:, : max(1, vocab_size - first)]
        if vocab_size <= first:
            scaled_NV = scaled_NV + float("-inf")
    peak_N1 = scaled_NV.detach().amax(-1, keepdim=True)
    torch.distributed.all_reduce(peak_N1, op=torch.distributed.ReduceOp.MAX, group=group)
    shifted_NV = scaled_NV - peak_N1
    exp_NV = shifted_NV.exp()
    local_N = targets_N - first
    inside_N = (local_N >= 0) & (local_N < shifted_NV.shape[-1])
    picked_N = shifted_NV.gather(-1, local_N.clamp(0, shifted_NV.shape[-1] - 1)[:, None])[:, 0]
    picked_N = torch.where(inside_N, picked_N, torch.zeros_like(picked_N))
    sums_2N = reduce_from_tensor_model_parallel_region(torch.stack([exp_NV.sum(-1), picked_N]))
    with torch.no_grad():
        weighted_N = torch.nan_to_num(exp_NV * shifted_NV).sum(-1)  # 0 * -inf of the padded rows
        torch.distributed.all_reduce(weighted_N, group=group)
        entropy_N = sums_2N[0].log() - weighted_N / sums_2N[0]
    return sums_2N[1] - sums_2N[0].log(), entropy_N


TargetLoss = Callable[[RowTensors, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, Any]]]
"""(row, log-probs [N], entropies [N]) -> (scalar loss, what to hand back for this micro-batch)."""


def run_rows(
    model: torch.nn.Module,
    rows: Sequence[RowTensors],
    target_loss: TargetLoss,
    *,
    vocab_size: int,
    temperature: float,
    forward_only: bool,
) -> list[dict[str, Any]]:
    """One micro-batch a row through Megatron's schedule for this layout. Returns what `target_loss` handed back for each row,
    in order, on the last pipeline stage and an empty list elsewhere. Gradients are left in the DDP buffers, finalised."""

    def forward_step(iterator: Any, chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        row: RowTensors = next(iterator)
        unwrap(chunk).rotary_pos_emb.set_positions(row.positions_T)
        output = chunk(row.token_ids_1T, row.positions_T[None], None, packed_seq_params=TreeRowParams(row.runs))

        def loss_of(logits_1TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            logprobs_N, entropy_N = target_logprobs(logits_1TV[0, row.trained_N], row.targets_N, vocab_size, temperature)
            loss, report = target_loss(row, logprobs_N, entropy_N)
            loss = loss + 0.0 * logits_1TV.sum() if row.trained_N.numel() == 0 else loss  # a filler row still runs backward
            return loss, torch.zeros((), dtype=torch.int), report

        return output, loss_of

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(rows),
        model=[model],
        num_microbatches=len(rows),
        seq_length=1,  # unused: lengths are exchanged, since rows differ
        micro_batch_size=1,
        forward_only=forward_only,
    )
