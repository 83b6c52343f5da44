"""`bench data`: how many tokens a second torch's DataLoader and NVIDIA DALI bring from the same cache, the same batches each."""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_arpo.bench.report import MIN_PAIRS, BenchReport, paired_ratio
from megatron_arpo.data.loader import BatchPlan, LoaderKind, check_loader, load_batches
from megatron_arpo.data.sequence_cache import CacheWriter, SequenceCache

_BATCH_SIZE = 128
_SHORTEST, _LONGEST = 64, 1024
"""Tokens; lengths are uniform between them, 544 in the mean."""
_VOCABULARY = 150_000
_PASS_SEQUENCES = 120_000
"""In a pass, of several epochs where the cache is smaller: the first moments of a worker are slower than the rest."""
_KINDS: tuple[LoaderKind, ...] = ("torch", "dali")


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds to the first batch, worker processes started in them, and what came a second from then on."""

    start_s: float
    sequences_per_s: float
    tokens_per_s: float


def measure(quick: bool) -> BenchReport:
    """Passes over one cache in turn: torch, DALI, torch, DALI, ..., with one worker process each and then with none.

    Before that every batch of both is compared, which also brings the cache into memory: what is measured is the loaders, not
    the disk. Raises ValueError where DALI is not installed, RuntimeError where the batches differ.
    """
    check_loader("dali")
    num_sequences, num_pairs = (20_000, MIN_PAIRS) if quick else (_PASS_SEQUENCES, 11)
    with tempfile.TemporaryDirectory() as folder:
        cache = _random_cache(Path(folder) / "sequences", num_sequences)
        plan = BatchPlan(num_sequences, _BATCH_SIZE, seed=0)
        _compare(cache, plan)
        passes: dict[tuple[int, LoaderKind], list[Pass]] = {}
        for num_workers in (1, 0):
            for _ in range(num_pairs):
                for kind in _KINDS:
                    passes.setdefault((num_workers, kind), []).append(_pass(cache, plan, kind, num_workers))
    return BenchReport(
        bench="data",
        settings={
            "sequences": num_sequences,
            "tokens": f"{_SHORTEST} to {_LONGEST}",
            "batch": _BATCH_SIZE,
            "passes": num_pairs,
            "sequences a pass": _PASS_SEQUENCES,
            "cache": "in memory",
            "identical batches": plan.batches_an_epoch,
        },
        rows=[
            {
                "loader": kind,
                "workers": num_workers,
                "tokens/s": round(statistics.median(one.tokens_per_s for one in found)),
                "sequences/s": round(statistics.median(one.sequences_per_s for one in found)),
                "first batch s": statistics.median(one.start_s for one in found),
            }
            for (num_workers, kind), found in passes.items()
        ],
        ratios={"dali_over_torch": paired_ratio(*([one.tokens_per_s for one in passes[1, kind]] for kind in ("dali", "torch")))},
    )


def _random_cache(folder: Path, num_sequences: int) -> SequenceCache:
    draw = np.random.default_rng(0)
    with CacheWriter(folder) as writer:
        for length in draw.integers(_SHORTEST, _LONGEST, num_sequences, endpoint=True):
            writer.add([(draw.integers(0, _VOCABULARY, length, np.int32), draw.integers(0, 2, length, np.uint8))])
        writer.finish("bench", {})
    return SequenceCache(folder)


def _compare(cache: SequenceCache, plan: BatchPlan) -> None:
    last = plan.batches_an_epoch
    ours, theirs = (load_batches(cache, plan, first=0, last=last, kind=kind, num_workers=1) for kind in _KINDS)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for name in ("token_ids", "loss_mask", "lengths"):
            if getattr(one, name).tobytes() != getattr(other, name).tobytes():
                raise RuntimeError(f"batch {number}: {name} from torch and from DALI differ")


def _pass(cache: SequenceCache, plan: BatchPlan, kind: LoaderKind, num_workers: int) -> Pass:
    started = time.perf_counter()
    last = _PASS_SEQUENCES // _BATCH_SIZE
    with closing(load_batches(cache, plan, first=0, last=last, kind=kind, num_workers=num_workers)) as batches:
        next(batches)
        first = time.perf_counter()
        num_sequences = num_tokens = 0
        for batch in batches:
            num_sequences += len(batch.lengths)
            num_tokens += len(batch.token_ids)
        seconds = time.perf_counter() - first
    return Pass(start_s=first - started, sequences_per_s=num_sequences / seconds, tokens_per_s=num_tokens / seconds)
