"""Tree attention, forward and backward, against dense attention in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_arpo.actor.attention import TreeCoreAttention, TreeRowParams
from megatron_arpo.actor.layout import MASK_BLOCK_TOKENS
from megatron_arpo.actor.row_tensors import _indices, _shape
from megatron_arpo.batch.context import BLOCKS_PER_RANK, context_slices
from megatron_arpo.batch.padding import pad_row
from megatron_arpo.bench.published_trees import REASONING, draw_tree
from megatron_arpo.types import PackedRow
from tests.gpu.rows import Recorder
from tests.gpu.sizes import rows_of, sequences
from tests.unit.trees import random_tree, tree_rows

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Largest error over the largest value: rounding of a few thousand products."""
CONTEXT_RANKS = (1, 2, 4)


def attention_rows(scale: int) -> dict[str, PackedRow]:
    """Rows of several shapes, some 4096 / scale tokens each."""
    tokens = 4096 // scale
    drawn = [draw_tree(REASONING.shrunk(8 * scale), seed, vocab_size=300) for seed in range(2)]
    return {
        "one path": rows_of(sequences(1, tokens, 300), tokens)[0],
        "flat batch": rows_of(sequences(7, tokens // 7, 300), tokens)[0],
        "small trees": tree_rows([random_tree(seed) for seed in range(max(2, 40 // scale))], "token-mean", "soft", tokens)[0],
        "published tree": tree_rows(drawn, "token-mean", "soft", tokens)[0],
    }


def attention_errors(
    row: PackedRow, num_ranks: int, rank: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Largest error over the largest value of the output and of the gradients of q, k and v on one context-parallel rank, which
    has its queries and the gathered keys; `heads` are those of queries and of keys."""
    block = MASK_BLOCK_TOKENS if device.type == "cuda" else 1
    row = pad_row(row, block * num_ranks * (BLOCKS_PER_RANK if num_ranks > 1 else 1))
    slices = context_slices(row.positions, num_ranks) if num_ranks > 1 else [((0, len(row)),)]
    mine_Q = _indices(slices[rank]).to(device)
    shape = replace(_shape(row.subtree_end, slices[rank], mine_Q, slices, device), row_order_T=None)
    generator = torch.Generator().manual_seed(1)

    def draw(tokens: int, num_heads: int) -> torch.Tensor:
        return torch.randn(tokens, 1, num_heads, head_dim, generator=generator).to(device, dtype)

    inputs = [draw(len(mine_Q), heads[0]), draw(len(row), heads[1]), draw(len(row), heads[1])]
    for one in inputs:
        one.requires_grad_()
    attention = TreeCoreAttention(config=None, layer_number=1, attn_mask_type=None, attention_type="self")
    output = attention(*inputs, None, packed_seq_params=TreeRowParams(shape, len(row)))
    towards = draw(len(mine_Q), heads[0]).view_as(output)
    found = [output, *torch.autograd.grad(output, inputs, towards)]

    exact = [one.detach().double().requires_grad_() for one in inputs]
    expected_output = dense_attention(*exact, torch.tensor(row.subtree_end, device=device), mine_Q)
    expected = [expected_output, *torch.autograd.grad(expected_output, exact, towards.double())]
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    return {name: relative_error(one, other) for name, one, other in zip(names, found, expected, strict=True)}


def dense_attention(
    query_Q1hd: torch.Tensor, key_T1gd: torch.Tensor, value_T1gd: torch.Tensor, end_T: torch.Tensor, mine_Q: torch.Tensor
) -> torch.Tensor:
    """By the definition, from a mask of all pairs: [Q, 1, h * d]."""
    groups = query_Q1hd.shape[2] // key_T1gd.shape[2]
    key_Thd, value_Thd = (x[:, 0].repeat_interleave(groups, dim=1) for x in (key_T1gd, value_T1gd))
    places_T = torch.arange(len(end_T), device=end_T.device)
    visible_QT = (places_T[None] <= mine_Q[:, None]) & (mine_Q[:, None] < end_T[None])
    scores_hQT = torch.einsum("qhd,thd->hqt", query_Q1hd[:, 0], key_Thd) / query_Q1hd.shape[-1] ** 0.5
    weights_hQT = scores_hQT.masked_fill(~visible_QT, float("-inf")).softmax(-1)
    return torch.einsum("hqt,thd->qhd", weights_hQT, value_Thd).flatten(1)[:, None]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().double() - expected.detach()).abs().max() / expected.detach().abs().max())


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_tree_attention_is_dense_attention(record: Recorder, device: torch.device, dtype: torch.dtype) -> None:
    card = device.type == "cuda"
    heads, head_dim = ((28, 4), 128) if card else ((4, 2), 16)
    for name, row in attention_rows(1 if card else 32).items():
        for num_ranks in CONTEXT_RANKS:
            worst = {"output": 0.0}
            for rank in range(num_ranks):
                errors = attention_errors(row, num_ranks, rank, heads, head_dim, dtype, device)
                worst = {which: max(error, worst.get(which, 0.0)) for which, error in errors.items()}
            which = max(worst, key=worst.__getitem__)
            record(
                f"tree attention, {str(dtype).removeprefix('torch.')}, {name}, cp {num_ranks}: error to float64",
                worst[which],
                at_most=BOUNDS[dtype],
                note=f"{len(row)} tokens; worst in the {which}",
            )
