"""bench actor-tree: a policy update on tree batches against the same update on the flat batch, packed and padded.

Tokens are counted on published shapes. Time and memory are measured on the same trees, on CPU with all lengths divided so that
attention's share of the work is that of a 7B model at full length.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_arpo.algorithm.advantage import group_advantages, leaf_weights
from megatron_arpo.batch.padding import pad_row
from megatron_arpo.batch.schedule import Placement, RowCost, Schedule, schedule_trees
from megatron_arpo.batch.tree import WeightedTree
from megatron_arpo.bench.memory import peak_bytes_of
from megatron_arpo.bench.published_trees import DEEP_SEARCH, REASONING, TreeShape, draw_tree, paths
from megatron_arpo.bench.report import MIN_PAIRS, BenchReport, Ratio, counted_ratio, paired_ratio, seconds_of
from megatron_arpo.config.actor import ActorSettings, RecomputeSettings
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.families.flops import key_flops, token_flops
from megatron_arpo.types import PackedRow

SHAPES = {"reasoning": (REASONING, 16), "deep search": (DEEP_SEARCH, 8)}
"""Shape and prompts of a mini-batch, as published."""
ROW_LIMITS = (65_536, 11_264)
NUM_TIMED = 2
"""Prompts of the mini-batch that is timed."""
NUM_FOR_MEMORY = 4
"""Prompts of the mini-batch whose memory is measured: enough that the longest row of either form is a full one."""
NUM_RANKS = 8
"""Data-parallel ranks of the schedule whose evenness is shown."""


def measure(quick: bool) -> BenchReport:
    from megatron_arpo.bench.actor import BenchActor

    cuda = torch.cuda.is_available()
    scale = 1 if cuda and not quick else 16 if quick else 8
    architecture = architecture_of(cuda, quick)
    cost = RowCost(per_token=token_flops(architecture), per_key=key_flops(architecture))
    rows: list[dict[str, Any]] = []
    ratios: dict[str, Ratio] = {}
    for name, (shape, num_prompts) in SHAPES.items():
        counted, ratio = _count(name, shape, num_prompts, cost)
        rows += counted
        ratios |= ratio
    with BenchActor(architecture, torch.bfloat16 if cuda else torch.float32, actor_settings(cuda and not quick)) as actor:
        for name, (shape, _) in SHAPES.items():
            measured, ratio = measure_shape(name, shape.shrunk(scale), ROW_LIMITS[0] // scale, cost, actor.update)
            rows += measured
            ratios |= ratio
    settings = {
        "lengths divided by (time and memory)": scale,
        "layers": architecture.num_layers,
        "hidden": architecture.hidden_size,
        "vocabulary": architecture.vocab_size,
        "pairs": MIN_PAIRS,
    }
    return BenchReport(bench="actor-tree", settings=settings, rows=rows, ratios=ratios)


def actor_settings(full_size: bool) -> ActorSettings:
    """Activations of a row of 65,536 tokens, with the state of four layers of a 7B model, fit a card of 80 GB only if computed again."""
    return ActorSettings(recompute=RecomputeSettings(granularity="full") if full_size else None)


def architecture_of(cuda: bool, quick: bool) -> Architecture:
    if cuda and not quick:
        sizes = dict(num_layers=4, hidden_size=3584, ffn_hidden_size=18944, num_heads=28, num_kv_heads=4, head_dim=128, vocab_size=152_064)
    else:
        sizes = dict(
            num_layers=1 if quick else 2, hidden_size=512, ffn_hidden_size=2304, num_heads=8, num_kv_heads=4, head_dim=64, vocab_size=1024
        )
    return Architecture(
        family="qwen2", tied_embeddings=False, norm_eps=1e-6, rope_theta=1e6, max_positions=32768, qkv_bias=True, qk_norm=False, **sizes
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forms:
    """The same mini-batch three ways."""

    tree: Schedule
    packed: Schedule
    padded: tuple[PackedRow, ...]

    def batches(self) -> dict[str, Sequence[PackedRow]]:
        """Rows of one rank, by the form's name."""
        return {"tree": self.tree.rows[0], "flat-packed": self.packed.rows[0], "flat-padded": self.padded}


def _forms(shape: TreeShape, num_prompts: int, row_limit: int, cost: RowCost, num_ranks: int = 1) -> _Forms:
    trees = [draw_tree(shape, seed, vocab_size=1024) for seed in range(num_prompts)]
    weighted, flat = [], []
    for tree, weights in zip(trees, leaf_weights(trees, "token-mean"), strict=True):
        advantages = group_advantages([reward.score for reward in tree.rewards])
        weighted.append(WeightedTree(tree=tree, advantages=advantages, weights=weights))
        flat += [
            WeightedTree(tree=path, advantages=(advantage,), weights=(weight,))
            for path, advantage, weight in zip(paths(tree), advantages, weights, strict=True)
        ]
    placement = Placement(num_ranks=num_ranks, max_row_tokens=row_limit, cost=cost)
    longest = shape.prompt_tokens + shape.max_response_tokens
    alone = [schedule_trees([one], placement, "soft").rows[0][0] for one in flat] if num_ranks == 1 else []
    return _Forms(
        tree=schedule_trees(weighted, placement, "soft"),
        packed=schedule_trees(flat, placement, "soft"),
        padded=tuple(pad_row(row, longest) for row in alone),
    )


def _count(name: str, shape: TreeShape, num_prompts: int, cost: RowCost) -> tuple[list[dict[str, Any]], dict[str, Ratio]]:
    rows, ratios = [], {}
    for limit in ROW_LIMITS:
        forms = _forms(shape, num_prompts, limit, cost)
        spread = _forms(shape, num_prompts, limit, cost, NUM_RANKS).tree
        unique = forms.tree.num_unique_tokens
        for form, tokens, count in (
            ("tree", forms.tree.num_tokens, len(forms.tree.rows[0])),
            (f"tree, DP {NUM_RANKS}", spread.num_tokens, sum(map(len, spread.rows))),
            ("flat-packed", forms.packed.num_tokens, len(forms.packed.rows[0])),
            ("flat-padded", sum(map(len, forms.padded)), len(forms.padded)),
        ):
            evenness = spread.largest_to_mean if form == f"tree, DP {NUM_RANKS}" else 1.0
            rows.append(_row(f"{name}, {num_prompts} prompts", form, limit, count, tokens, unique, evenness))
        if limit == ROW_LIMITS[0]:
            ratios[ratio_name("tokens_tree_over_unique", name)] = counted_ratio(forms.tree.num_tokens, unique)
            ratios[ratio_name("tokens_tree_over_flat", name)] = counted_ratio(forms.tree.num_tokens, forms.packed.num_tokens)
            ratios[ratio_name("largest_to_mean_cost", name)] = counted_ratio(spread.largest_to_mean, 1.0)
    return rows, ratios


def measure_shape(
    name: str, shape: TreeShape, row_limit: int, cost: RowCost, update: Callable[[Sequence[PackedRow]], object]
) -> tuple[list[dict[str, Any]], dict[str, Ratio]]:
    """Time and memory of `update` on the three forms of a mini-batch: table rows and ratios."""
    timed, time = _time(name, shape, row_limit, cost, update)
    weighed, memory = _memory(name, shape, row_limit, cost, update)
    return timed + weighed, time | memory


def _time(
    name: str, shape: TreeShape, row_limit: int, cost: RowCost, update: Callable[[Sequence[PackedRow]], object]
) -> tuple[list[dict[str, Any]], dict[str, Ratio]]:
    forms = _forms(shape, NUM_TIMED, row_limit, cost)
    batches = forms.batches()
    for rows in batches.values():
        update(rows)  # warm-up: allocators, and compilation on GPU
    seconds: dict[str, list[float]] = {form: [] for form in batches}
    for pair in range(MIN_PAIRS):
        for form, rows in batches.items():
            if form != "flat-padded" or pair == 0:  # no ratio is made of it
                seconds[form].append(seconds_of(lambda rows=rows: update(rows)))
    tokens = {form: sum(map(len, rows)) for form, rows in batches.items()}
    table = [
        _row(f"{name}, {NUM_TIMED} prompts, timed", form, row_limit, len(rows), tokens[form], forms.tree.num_unique_tokens, 1.0)
        | {"seconds": statistics.median(seconds[form])}
        for form, rows in batches.items()
    ]
    time = paired_ratio(seconds["tree"], seconds["flat-packed"])
    by_tokens = tokens["tree"] / tokens["flat-packed"]
    return table, {
        ratio_name("time_tree_over_flat", name): time,
        ratio_name("time_ratio_over_token_ratio", name): Ratio(
            value=time.value / by_tokens, low=time.low / by_tokens, high=time.high / by_tokens, num_pairs=time.num_pairs
        ),
    }


def _memory(
    name: str, shape: TreeShape, row_limit: int, cost: RowCost, update: Callable[[Sequence[PackedRow]], object]
) -> tuple[list[dict[str, Any]], dict[str, Ratio]]:
    forms = _forms(shape, NUM_FOR_MEMORY, row_limit, cost)
    table, peaks = [], {}
    for form, rows in forms.batches().items():
        peaks[form] = peak_bytes_of(lambda rows=rows: update(rows))
        tokens, unique = sum(map(len, rows)), forms.tree.num_unique_tokens
        row = _row(f"{name}, {NUM_FOR_MEMORY} prompts, memory", form, row_limit, len(rows), tokens, unique, 1.0)
        table.append(row | {"peak MiB": peaks[form] / 2**20})
    return table, {ratio_name("memory_tree_over_flat", name): counted_ratio(peaks["tree"], peaks["flat-packed"])}


def ratio_name(ratio: str, shape: str) -> str:
    """The reasoning shape has the plain name."""
    return ratio if shape == "reasoning" else f"{ratio}, {shape}"


def _row(shape: str, form: str, limit: int, num_rows: int, tokens: int, unique: int, evenness: float) -> dict[str, Any]:
    return {
        "shape": shape,
        "form": form,
        "row limit": limit,
        "micro-batches": num_rows,
        "tokens": tokens,
        "over unique": tokens / unique,
        "largest/mean cost": evenness,
        "seconds": "",
        "peak MiB": "",
    }
