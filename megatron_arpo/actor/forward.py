"""Packed rows through the Megatron model, by the pipeline schedule of its layout.

Suffix: N targets of a row on this context-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_arpo.actor.attention import TreeRowParams
from megatron_arpo.actor.model import unwrap
from megatron_arpo.actor.row_tensors import RowTensors
from megatron_arpo.actor.target_logprobs import LogitSettings, target_logprobs

TargetLoss = Callable[[RowTensors, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, Any]]]
"""(row, log-probs [N], entropies [N]) -> (scalar loss, what to hand back for this micro-batch)."""


def run_rows(
    chunks: Sequence[torch.nn.Module],
    rows: Sequence[RowTensors],
    target_loss: TargetLoss,
    *,
    logits: LogitSettings,
    temperature: float,
    forward_only: bool,
) -> list[dict[str, Any]]:
    """One micro-batch a row through Megatron's schedule for this layout. Returns what `target_loss` handed back for each row,
    in order, on the last pipeline stage and an empty list elsewhere. Gradients are left in the DDP buffers, finalised."""
    mixed_precision = {"fp32_output": False} if unwrap(chunks[0]).config.bf16 else {}

    def forward_step(iterator: Any, chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        row: RowTensors = next(iterator)
        model = unwrap(chunk)
        model.rotary_pos_emb.set_positions(row.positions_Q)
        params = TreeRowParams(row.shape, row.num_tokens)
        output = chunk(row.token_ids_1Q, row.positions_Q[None], None, packed_seq_params=params, **mixed_precision)

        def loss_of(hidden_T1h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            found = target_logprobs(hidden_T1h, model.output_weight, row.trained_N, row.targets_N, temperature, logits)
            loss, report = target_loss(row, *found)
            return loss, torch.zeros((), dtype=torch.int), report

        return output, loss_of

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(rows) for _ in chunks] if len(chunks) > 1 else iter(rows),
        model=list(chunks),
        num_microbatches=len(rows),
        seq_length=rows[0].num_tokens,  # of all rows in an interleaved pipeline; elsewhere lengths are exchanged
        micro_batch_size=1,
        forward_only=forward_only,
    )
