"""Log-prob and entropy of the trained tokens from the last stage's hidden states, without ever holding all logits.

Logits are made for `chunk_tokens` targets at a time, on the vocabulary slice of this tensor-parallel rank, and made again in the
backward pass. Suffixes: N targets, C of them in a chunk, V vocabulary rows on this rank, h hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitSettings:
    """`vocab_size` is the tokenizer's: padded rows at and behind it get no probability. `chunk_tokens` bounds the logits that exist
    at a time to 8 * chunk_tokens * V bytes, a copy included."""

    vocab_size: int
    chunk_tokens: int
    sequence_parallel: bool


def target_logprobs(
    hidden_T1h: torch.Tensor,
    output_weight_Vh: torch.Tensor,
    trained_N: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float,
    settings: LogitSettings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob [N] (with gradient) and entropy [N] in nats (without) of `targets_N` at the positions `trained_N`, over the
    vocabulary of all tensor-parallel ranks at `temperature`. `hidden_T1h` is this rank's part under sequence parallelism."""
    if settings.sequence_parallel:
        hidden_T1h = gather_from_sequence_parallel_region(hidden_T1h, tensor_parallel_output_grad=True)
    else:
        hidden_T1h = copy_to_tensor_model_parallel_region(hidden_T1h)
    return _TargetLogprobs.apply(hidden_T1h[:, 0][trained_N], output_weight_Vh, targets_N, temperature, settings)


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_Nh: torch.Tensor, weight_Vh: torch.Tensor, targets_N: torch.Tensor, temperature: float, settings: LogitSettings
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group = parallel_state.get_tensor_model_parallel_group()
        logprobs_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_Nh.device)
        entropy_N, log_total_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        for chunk in _chunks(len(targets_N), settings.chunk_tokens):
            logits_CV = _logits(hidden_Nh[chunk], weight_Vh, temperature, settings.vocab_size)
            peak_C1 = logits_CV.amax(-1, keepdim=True)
            torch.distributed.all_reduce(peak_C1, op=torch.distributed.ReduceOp.MAX, group=group)
            logits_CV -= peak_C1
            row_C, inside_C = _local_rows(targets_N[chunk], weight_Vh)
            picked_C = logits_CV.gather(-1, row_C[:, None])[:, 0].masked_fill_(~inside_C, 0.0)
            exp_CV = logits_CV.exp()
            total_C = exp_CV.sum(-1)
            weighted_C = exp_CV.mul_(logits_CV).nan_to_num_(nan=0.0).sum(-1)  # 0 * -inf of the padded rows
            sums_3C = torch.stack([total_C, picked_C, weighted_C])
            torch.distributed.all_reduce(sums_3C, group=group)
            log_total_C = sums_3C[0].log()
            logprobs_N[chunk] = sums_3C[1] - log_total_C
            entropy_N[chunk] = log_total_C - sums_3C[2] / sums_3C[0]
            log_total_N[chunk] = log_total_C + peak_C1[:, 0]
        ctx.save_for_backward(hidden_Nh, weight_Vh, targets_N, log_total_N)
        ctx.temperature, ctx.settings = temperature, settings
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor, _grad_entropy: torch.Tensor) -> tuple[Any, ...]:
        """Of the hidden states this rank's part of the vocabulary only; target_logprobs' first line sums over the ranks."""
        hidden_Nh, weight_Vh, targets_N, log_total_N = ctx.saved_tensors
        grad_hidden_Nh = torch.empty_like(hidden_Nh)
        grad_weight_Vh = torch.zeros_like(weight_Vh, dtype=torch.float32)
        for chunk in _chunks(len(targets_N), ctx.settings.chunk_tokens):
            logits_CV = _logits(hidden_Nh[chunk], weight_Vh, ctx.temperature, ctx.settings.vocab_size)
            row_C, inside_C = _local_rows(targets_N[chunk], weight_Vh)
            grad_CV = logits_CV.sub_(log_total_N[chunk, None]).exp_().neg_()  # onehot - softmax
            grad_CV.scatter_add_(1, row_C[:, None], inside_C.to(grad_CV.dtype)[:, None])
            grad_CV *= (grad_N[chunk] / ctx.temperature)[:, None]
            grad_CV = grad_CV.to(weight_Vh.dtype)
            grad_hidden_Nh[chunk] = grad_CV @ weight_Vh
            if weight_Vh.dtype == torch.float32:
                grad_weight_Vh.addmm_(grad_CV.t(), hidden_Nh[chunk])
            else:
                grad_weight_Vh += grad_CV.t() @ hidden_Nh[chunk]
        return grad_hidden_Nh, grad_weight_Vh.to(weight_Vh.dtype), None, None, None


def _chunks(num_targets: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, num_targets, chunk_tokens)]


def _first_row(weight_Vh: torch.Tensor) -> int:
    return weight_Vh.shape[0] * parallel_state.get_tensor_model_parallel_rank()


def _local_rows(targets_C: torch.Tensor, weight_Vh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(row of this rank's weight, whether the target is one of its rows); row 0 stands for a target of another rank."""
    row_C = targets_C - _first_row(weight_Vh)
    inside_C = (row_C >= 0) & (row_C < weight_Vh.shape[0])
    return row_C.masked_fill(~inside_C, 0), inside_C


def _logits(hidden_Ch: torch.Tensor, weight_Vh: torch.Tensor, temperature: float, vocab_size: int) -> torch.Tensor:
    """float32 [C, V]; -inf for padded rows."""
    logits_CV = (hidden_Ch @ weight_Vh.t()).float()
    logits_CV /= temperature
    logits_CV[:, max(0, vocab_size - _first_row(weight_Vh)) :] = float("-inf")
    return logits_CV
