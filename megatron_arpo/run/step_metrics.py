"""What metrics.jsonl says of a step's updates."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_arpo.actor.sums import Sums, add_up


def update_metrics(updates: Sequence[Sums]) -> dict[str, float]:
    """Means over the targets of all updates, each counted once for every leaf through it."""
    if not updates:
        return {}
    total = add_up(updates)
    means = ("clipped", "ratio_kl", "entropy", "mismatch", "importance_capped", "reference_kl")
    return {
        "actor/loss": total["loss"] / len(updates),
        "actor/updates": float(len(updates)),
        "actor/tokens": total["tokens"],
        "actor/row_tokens": total["row_tokens"],
        "actor/grad_norm": total["grad_norm_max"],
        "actor/lr": updates[-1]["lr_max"],
        "actor/mismatch_max": total["mismatch_max"],
        **{f"actor/{name}": total[name] / total["tokens"] for name in means if name in total},
    }
