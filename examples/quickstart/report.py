"""The quickstart's closing table, from the metrics that its runs wrote."""

from __future__ import annotations

import statistics
from pathlib import Path

from megatron_arpo.observe.metrics import read_metrics


def quickstart_table(folder: Path, seconds: dict[str, float], peak_bytes: int) -> str:
    """Every number is read from the run folders; `seconds` are the wall times of the commands."""
    sft = [row for row in read_metrics(folder / "sft/metrics.jsonl") if row["phase"] == "sft"]
    rows = read_metrics(folder / "arpo/metrics.jsonl")
    train = [row for row in rows if row["phase"] == "train"]
    sync = [row for row in rows if row["phase"] == "sync"]
    evals = [row for row in rows if row["phase"] == "eval"]
    saves = [row for row in rows if row["phase"] == "checkpoint"]
    bare = [row for row in rows if row["phase"] == "eval_without_tools"]

    def pair(title: str, name: str, found: list[dict]) -> str:
        return f"  {title:36} {found[0][name]:8.3f} {found[-1][name]:8.3f}"

    def phase_seconds(name: str) -> float:
        return sum(row.get(f"seconds/{name}", 0.0) for row in train)

    lines = [
        "",
        f"  {'held-out prompts, sampled at T=1':36} {'before':>8} {'after':>8}",
        pair("reward", "reward", evals),
        pair("pass@1", "pass@1", evals),
        pair("accuracy among well-formed outputs", "accuracy_well_formed", evals),
        pair("share that used the tool", "tool_share", evals),
        pair("tool calls a trajectory", "tool_calls", evals),
        pair("reward with the tool switched off", "reward", bare),
        "",
        f"  training steps {len(train)}, forks {sum(row['num_forks'] for row in train):.0f}, "
        f"tool calls {sum(row['tools/python/calls'] for row in train):.0f}",
        f"  SFT {statistics.median(row['tokens_per_second'] for row in sft):.0f} tokens/s, "
        f"rollout {statistics.median(row['tokens_per_second/rollout'] for row in train):.0f} sampled tokens/s, "
        f"update {statistics.median(row['tokens_per_second/update'] for row in train):.0f} computed tokens/s (medians over steps)",
        f"  largest log-prob difference of actor and engine after a sync: {max(row['logprob_diff_max'] for row in sync):.2g} "
        f"over {len(sync)} syncs",
        "  seconds: "
        + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items())
        + " (of which "
        + ", ".join(f"{name} {phase_seconds(name):.0f}" for name in ("rollout", "update", "sync", "eval"))
        + f", checkpoint {sum(row['seconds'] for row in saves):.0f}"
        + f"), in all {sum(seconds.values()):.0f}; peak memory {peak_bytes / 2**30:.1f} GiB",
        f"  run folder: {folder}  (model in {folder}/arpo/hf)",
    ]
    return "\n".join(lines)
