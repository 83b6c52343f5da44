"""Tree attention, the core attention of every layer: each query sees its ancestors in a depth-first row and nothing else.

A flat batch is the case of one-path trees, so there is this one path. On GPU it is FlexAttention with a block mask, on CPU it goes
run by run (actor/run_attention.py). Under context parallelism a rank has slices of
the queries and gathers keys and values. Suffixes: T tokens of the row, Q of them on this rank, h query heads, g KV heads, d head
dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron_arpo.actor.run_attention import attend_runs
from megatron_arpo.actor.tree_mask import QueryRun


@dataclass(frozen=True, slots=True)
class TreeRowShape:
    """A row as attention sees it on this rank: `runs` on CPU, `mask` on GPU. `row_order_T` puts the keys that the context-parallel
    ranks hold, one rank after the other, into the order of the row; None where there is one rank."""

    runs: tuple[QueryRun, ...]
    mask: BlockMask | None
    row_order_T: torch.Tensor | None


class TreeRowParams(PackedSeqParams):
    """Carries a row's shape to the core attention in Megatron's own argument; the layout stays its default [Q, 1, heads, d]."""

    def __init__(self, shape: TreeRowShape, num_tokens: int) -> None:
        super().__init__(qkv_format="sbhd", max_seqlen_q=num_tokens, max_seqlen_kv=num_tokens)
        self.shape = shape


class TreeCoreAttention(MegatronModule):
    """The core attention of Megatron's layer spec, over one packed row."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, softmax_scale: float | None = None, **_unused: Any
    ) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale

    def forward(
        self,
        query_Q1hd: torch.Tensor,
        key_Q1gd: torch.Tensor,
        value_Q1gd: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: TreeRowParams | None = None,
    ) -> torch.Tensor:
        """Returns [Q, 1, h * d]."""
        shape = packed_seq_params.shape
        if shape.row_order_T is not None:
            key_Q1gd, value_Q1gd = _gather_row(key_Q1gd, shape.row_order_T), _gather_row(value_Q1gd, shape.row_order_T)
        query_hQd, key_gTd, value_gTd = (x.squeeze(1).transpose(0, 1) for x in (query_Q1hd, key_Q1gd, value_Q1gd))
        if shape.mask is None:
            output_hQd = attend_runs(shape.runs, query_hQd, key_gTd, value_gTd, self._scale)
        else:
            output_hQd = _compiled_flex_attention()(
                query_hQd[None], key_gTd[None], value_gTd[None], block_mask=shape.mask, scale=self._scale, enable_gqa=True
            )[0]
        return output_hQd.transpose(0, 1).reshape(query_Q1hd.shape[0], 1, -1)


def _gather_row(x_Q1gd: torch.Tensor, row_order_T: torch.Tensor) -> torch.Tensor:
    """The whole row's keys or values [T, 1, g, d]; their gradients are summed over the ranks."""
    group = parallel_state.get_context_parallel_group()
    return gather_from_sequence_parallel_region(x_Q1gd, tensor_parallel_output_grad=True, group=group).index_select(0, row_order_T)


@cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention, dynamic=True)
