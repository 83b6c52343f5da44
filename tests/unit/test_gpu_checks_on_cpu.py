"""What can be known on CPU of the checks that need a card: how they judge, and the way that a row takes to FlexAttention."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megatron_arpo.actor.attention import TreeCoreAttention, TreeRowParams, TreeRowShape
from megatron_arpo.actor.tree_mask import block_mask, plan_runs
from megatron_arpo.batch.context import context_slices
from tests.gpu.rows import Recorder, read_rows, table, verdict_of
from tests.gpu.sizes import TOY, WIDE, rows_of, sequences
from tests.gpu.test_attention import attention_errors, attention_rows
from tests.gpu.test_speed import update_flops


@pytest.mark.parametrize(
    ("value", "at_most", "at_least", "verdict"),
    [
        (0.8, 0.8, None, "pass"), (0.81, 0.8, None, "FAIL"), (0.45, None, 0.45, "pass"), (0.44, None, 0.45, "FAIL"),
        (3.0, None, None, "measured"), (math.nan, 1.0, None, "FAIL"), (math.inf, None, 1.0, "FAIL"),
    ],
)  # fmt: skip
def test_verdicts(value: float, at_most: float | None, at_least: float | None, verdict: str) -> None:
    assert verdict_of(value, at_most, at_least, unjudged=False) == verdict
    assert verdict_of(value, at_most, at_least, unjudged=True) == "dry run"


def test_rows_are_kept_in_order_and_shown(tmp_path: Path) -> None:
    record = Recorder(tmp_path / "rows.jsonl", dry_run=False)
    record("first", 0.5, at_most=1.0, note="of two")
    record("second", 2.0, at_most=1.0)
    record.not_installed("third", "Transformer Engine")
    rows = read_rows(record.path)
    assert [(row.name, row.verdict) for row in rows] == [("first", "pass"), ("second", "FAIL"), ("third", "not installed")]
    assert record.failed == ["second"]
    assert table(rows).splitlines()[1].split() == ["first", "0.5", "<=", "1", "pass", "of", "two"]


def test_update_flops_by_hand() -> None:
    """Two rows of two tokens: 4 tokens, and 1 + 2 keys each."""
    per_token = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96) + 64 * 300  # two layers and the output layer
    per_key = 2 * 2 * 64
    assert update_flops(TOY, num_rows=2, length=2) == 6 * (4 * per_token + 6 * per_key)


def test_the_wide_stack_is_a_7b_model() -> None:
    layer = WIDE.hidden_size * (2 * 28 * 128 + 2 * 4 * 128) + 3 * WIDE.hidden_size * WIDE.ffn_hidden_size
    assert 7.5e9 < 28 * layer + 2 * WIDE.hidden_size * WIDE.vocab_size < 7.7e9


def test_sequences_can_be_learned_and_weigh_one() -> None:
    (row,) = rows_of(sequences(2, 20, 300), 64)
    assert sum(row.weight) == pytest.approx(1.0) and sum(row.multiplicity) == 38


@pytest.mark.parametrize("name", ["one path", "flat batch", "small trees", "published tree"])
def test_attention_check_passes_on_cpu(name: str) -> None:
    row = attention_rows(32)[name]
    for num_ranks, rank in ((1, 0), (2, 0), (4, 3)):
        errors = attention_errors(row, num_ranks, rank, (4, 2), 16, torch.float32, torch.device("cpu"))
        assert set(errors) == {"output", "gradient of q", "gradient of k", "gradient of v"} and max(errors.values()) < 1e-4


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_block_mask_takes_the_way_through_the_core_attention(num_ranks: int) -> None:
    """FlexAttention, uncompiled and forward only, in the place where a card runs it."""
    row = rows_of(sequences(4, 256, 300), 1024)[0]
    mine = context_slices(row.positions, num_ranks)[0] if num_ranks > 1 else ((0, len(row)),)
    mine_Q = torch.cat([torch.arange(start, end) for start, end in mine])
    generator = torch.Generator().manual_seed(0)
    sizes = ((len(mine_Q), 4), (1024, 2), (1024, 2))
    query, key, value = (torch.randn(tokens, 1, heads, 16, generator=generator) for tokens, heads in sizes)
    attention = TreeCoreAttention(config=None, layer_number=1, attn_mask_type=None, attention_type="self")
    shapes = (
        TreeRowShape((), block_mask(torch.tensor(row.subtree_end), mine_Q), None),
        TreeRowShape(plan_runs(row.subtree_end, mine), None, None),
    )
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        by_mask, by_runs = (attention(query, key, value, None, packed_seq_params=TreeRowParams(shape, 1024)) for shape in shapes)
    assert by_mask.shape == (len(mine_Q), 1, 64)
    assert torch.allclose(by_mask, by_runs, atol=1e-5)
