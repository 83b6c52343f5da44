"""Tree attention on CPU: one call of PyTorch's flash kernel for a run of queries and a range of keys that it sees.

A run sees whole ranges of ancestors and, causally, itself. The parts are put together by their log-sum-exp (as in
arXiv 2205.14135, sec. 3.1), so that no key is copied, no mask is made, and the backward pass adds each part's gradient where it
belongs. Suffixes: T keys, Q queries, h query heads, g KV heads, d head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_arpo.actor.tree_mask import QueryRun

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_runs(
    runs: Sequence[QueryRun], query_hQd: torch.Tensor, key_gTd: torch.Tensor, value_gTd: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Output [h, Q, d]; `scale` of the scores is 1 / sqrt(d) where None."""
    return _RunAttention.apply(query_hQd, key_gTd, value_gTd, runs, scale)


def _parts(run: QueryRun) -> Iterator[tuple[slice, bool]]:
    """Keys that every query of the run sees, and last its own, seen causally."""
    for start, end in run.ancestor_ranges:
        yield slice(start, end), False
    yield slice(run.start, run.end), True


def _queries(run: QueryRun) -> slice:
    return slice(run.first, run.first + run.end - run.start)


class _RunAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_hQd: torch.Tensor, key_gTd: torch.Tensor, value_gTd: torch.Tensor, runs: Sequence[QueryRun], scale: float | None
    ) -> torch.Tensor:
        output_hQd = _empty_like(query_hQd)
        log_sum_hQ = query_hQd.new_empty(query_hQd.shape[:2], dtype=torch.float32)
        for run in runs:
            mine = _queries(run)
            output, log_sum = None, None
            for keys, causal in _parts(run):
                part, part_sum = _forward(
                    query_hQd[None, :, mine], key_gTd[None, :, keys], value_gTd[None, :, keys], is_causal=causal, scale=scale
                )
                output, log_sum = (part, part_sum) if output is None else _put_together(output, log_sum, part, part_sum)
            output_hQd[:, mine], log_sum_hQ[:, mine] = output[0], log_sum[0]
        ctx.save_for_backward(query_hQd, key_gTd, value_gTd, output_hQd, log_sum_hQ)
        ctx.runs, ctx.scale = runs, scale
        return output_hQd

    @staticmethod
    def backward(ctx: Any, grad_hQd: torch.Tensor) -> tuple[Any, ...]:
        query_hQd, key_gTd, value_gTd, output_hQd, log_sum_hQ = ctx.saved_tensors
        grad_query_hQd, grad_key_gTd, grad_value_gTd = (
            _empty_like(query_hQd).zero_(),
            _empty_like(key_gTd).zero_(),
            _empty_like(value_gTd).zero_(),
        )
        for run in ctx.runs:
            mine = _queries(run)
            for keys, causal in _parts(run):
                # with output and log-sum-exp of all parts the kernel gives this part's share of the gradients
                grad_query, grad_key, grad_value = _backward(
                    grad_hQd[None, :, mine], query_hQd[None, :, mine], key_gTd[None, :, keys], value_gTd[None, :, keys],
                    output_hQd[None, :, mine], log_sum_hQ[None, :, mine], 0.0, causal, scale=ctx.scale,
                )  # fmt: skip
                grad_query_hQd[:, mine] += grad_query[0]
                grad_key_gTd[:, keys] += grad_key[0]
                grad_value_gTd[:, keys] += grad_value[0]
        return grad_query_hQd, grad_key_gTd, grad_value_gTd, None, None


def _put_together(
    output: torch.Tensor, log_sum: torch.Tensor, part: torch.Tensor, part_sum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys from that over each. `output` [1, h, n, d], `log_sum` [1, h, n]."""
    share = torch.sigmoid(part_sum - log_sum)[..., None].to(output.dtype)
    return torch.lerp(output, part, share), torch.logaddexp(log_sum, part_sum)


def _empty_like(x_hTd: torch.Tensor) -> torch.Tensor:
    """Tokens first in memory, as Megatron's layers have them."""
    heads, num_tokens, dim = x_hTd.shape
    return x_hTd.new_empty(num_tokens, heads, dim).transpose(0, 1)
