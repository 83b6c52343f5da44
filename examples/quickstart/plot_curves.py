"""Reward curves of finished quickstarts as one picture: python examples/quickstart/plot_curves.py OUT.png RUN_FOLDER..."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from megatron_arpo.observe.metrics import read_metrics

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")  # told apart by people who can't tell red from green
MARKERS = ("o", "s", "^", "D")


def main() -> None:
    target, *folders = map(Path, sys.argv[1:])
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for folder, colour, marker in zip(folders, COLOURS, MARKERS, strict=False):
        rows = read_metrics(folder / "arpo/metrics.jsonl")
        train = [row for row in rows if row["phase"] == "train"]
        held_out = [row for row in rows if row["phase"] == "eval"]
        axes.plot([row["step"] for row in train], [row["reward_mean"] for row in train], color=colour, alpha=0.3, linewidth=1)
        label = f"{folder.name.removeprefix('quickstart-')}: {held_out[0]['reward']:.2f} to {held_out[-1]['reward']:.2f}"
        axes.plot([row["step"] for row in held_out], [row["reward"] for row in held_out], color=colour, marker=marker, label=label)
    axes.set(xlabel="ARPO step", ylabel="mean reward", title="Quickstart: held-out reward (marked) and training reward (thin)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    main()
