"""Tree attention: every query sees its ancestors in a depth-first row and nothing else.

Query q sees key k iff k <= q < subtree_end[k]. A flat batch is the case of one-path trees. The row's shape reaches each layer
inside Megatron's packed_seq_params, and its positions through the rotary embedding, since both are Megatron's own
arguments. One scaled_dot_product_attention call a run of tokens, over the keys of its ancestors.
Suffixes: T tokens in the row, h query heads, g KV heads, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Queries [start, end) that share their ancestors: the key ranges, in row order, before `start`."""

    start: int
    end: int
    ancestor_ranges: tuple[tuple[int, int], ...]


def plan_runs(subtree_end: list[int]) -> tuple[QueryRun, ...]:
    """Row shape [T] -> the runs of tokens that lie on one path, each with its ancestors.

    Example: subtree_end [6, 6, 4, 4, 6, 6] (a stem of two, a child of two, another child of two) gives runs [0,2) with no
    ancestors, [2,4) and [4,6) each with ancestors [0,2).
    """
    runs: list[QueryRun] = []
    open_ranges: list[tuple[int, int]] = []  # the path from the root to here; each ends where its subtree may not
    start = 0
    while start < len(subtree_end):
        end = start + 1
        while end < len(subtree_end) and subtree_end[end] == subtree_end[start] and end < subtree_end[start]:
            end += 1
        while open_ranges and subtree_end[open_ranges[-1][0]] <= start:
            open_ranges.pop()
        runs.append(QueryRun(start, end, _merged(open_ranges)))
        open_ranges.append((start, end))
        start = end
    return tuple(runs)


def _merged(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return tuple(merged)


class TreeRowParams(PackedSeqParams):
    """Carries a row's runs to the core attention; the layout stays Megatron's default [T, 1, heads, d]."""

    def __init__(self, runs: tuple[QueryRun, ...]) -> None:
        num_tokens = runs[-1].end
        super().__init__(qkv_format="sbhd", max_seqlen_q=num_tokens, max_seqlen_kv=num_tokens)
        self.runs = runs


class TreeCoreAttention(MegatronModule):
    """The core attention of Megatron's layer spec, over one packed row."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, softmax_scale: float | None = None, **_unused: Any
    ) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale

    def forward(
        self,
        query_T1hd: torch.Tensor,
        key_T1gd: torch.Tensor,
        value_T1gd: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: TreeRowParams | None = None,
    ) -> torch.Tensor:
        """Returns [T, 1, h * d]."""
        query_hTd, key_gTd, value_gTd = (x.squeeze(1).transpose(0, 1) for x in (query_T1hd, key_T1gd, value_T1gd))
        outputs = [self._attend(run, query_hTd, key_gTd, value_gTd) for run in packed_seq_params.runs]
        output_hTd = torch.cat(outputs, dim=1)
        return output_hTd.transpose(0, 1).reshape(query_T1hd.shape[0], 1, -1)

    def _attend(self, run: QueryRun, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        own = slice(run.start, run.end)
        if not run.ancestor_ranges:
            return self._sdpa(query[:, own], key[:, own], value[:, own], None)
        ranges = _merged([*run.ancestor_ranges, (run.start, run.end)])
        keys, values = _gather(key, ranges), _gather(value, ranges)
        num_queries, num_keys = run.end - run.start, keys.shape[1]
        visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
        return self._sdpa(query[:, own], keys, values, visible)

    def _sdpa(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=visible, is_causal=visible is None, scale=self._scale, enable_gqa=True
        )[0]


def _gather(x_gTd: torch.Tensor, ranges: tuple[tuple[int, int], ...]) -> torch.Tensor:
    if len(ranges) == 1:
        return x_gTd[:, ranges[0][0] : ranges[0][1]]
    return torch.cat([x_gTd[:, start:end] for start, end in ranges], dim=1)


class PositionedRotaryEmbedding(RotaryEmbedding):
    """Megatron's rotary embedding at the positions of the current row instead of at its indices.

    `set_positions` comes before each forward; a tree's siblings have equal positions.
    """

    def set_positions(self, positions_T: torch.Tensor) -> None:
        self._positions_T = positions_T

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> torch.Tensor:
        """Returns angles [T, 1, 1, d]."""
        angles = torch.outer(self._positions_T.to(self.inv_freq.dtype), self.inv_freq.to(self._positions_T.device))
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
