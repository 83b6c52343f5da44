"""The policy update of a step: log-probs before it, of the reference policy, and one optimizer update a mini-batch.

Suffix N: targets of a row on this context-parallel rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from megatron.core import parallel_state

from megatron_arpo.actor.reference import ReferencePolicy
from megatron_arpo.actor.row_tensors import RowTensors
from megatron_arpo.actor.sums import Sums
from megatron_arpo.actor.update import Updater
from megatron_arpo.algorithm.loss import (
    ClipSettings,
    EntropyScale,
    entropy_scaled,
    importance_weights,
    kl_to_reference,
    tree_policy_loss,
)
from megatron_arpo.config.algorithm import LossSettings
from megatron_arpo.types import PackedRow


def policy_step(
    updater: Updater, reference: ReferencePolicy | None, mini_batches: Sequence[Sequence[PackedRow]], loss: LossSettings, temperature: float
) -> list[Sums]:
    """One optimizer update a mini-batch, all against the policy before the first one.

    Rows are this data-parallel rank's; `reference` is needed where `loss.kl_coef` is positive. Returns the sums of
    `policy_loss` for each mini-batch, empty off the last pipeline stage.
    """
    batches = [updater.tensors(rows) for rows in mini_batches]
    if loss.kl_coef:
        with reference.in_place():
            found = [updater.logprobs(rows, temperature) for rows in batches]
        batches = [
            [replace(row, reference_logprobs_N=logprobs) for row, (logprobs, _) in zip(rows, known, strict=True)] if known else rows
            for rows, known in zip(batches, found, strict=True)
        ]
    if len(batches) > 1 or loss.entropy_advantage:
        batches = _with_old_policy(updater, batches, loss, temperature)
    return [updater.step(rows, partial(policy_loss, loss=loss), temperature) for rows in batches]


def _with_old_policy(
    updater: Updater, batches: Sequence[Sequence[RowTensors]], loss: LossSettings, temperature: float
) -> list[list[RowTensors]]:
    """The rows with the log-probs of the policy as it is now, and with AEPO's advantages where asked for."""
    found = [updater.logprobs(rows, temperature) for rows in batches]
    if not found[0]:
        return [list(rows) for rows in batches]  # the last pipeline stage alone knows them, and alone needs them
    pairs = [list(zip(rows, known, strict=True)) for rows, known in zip(batches, found, strict=True)]
    scale = _entropy_scale([pair for one in pairs for pair in one]) if loss.entropy_advantage else None

    def known_row(row: RowTensors, logprobs_N: torch.Tensor, entropy_N: torch.Tensor) -> RowTensors:
        row = replace(row, old_logprobs_N=logprobs_N)
        if scale is None:
            return row
        positive_N, negative_N = entropy_scaled(row.advantage_pos_N, row.advantage_neg_N, entropy_N, scale, loss.entropy_advantage)
        return replace(row, advantage_pos_N=positive_N, advantage_neg_N=negative_N)

    return [[known_row(row, *known) for row, known in one] for one in pairs]


def _entropy_scale(known: Sequence[tuple[RowTensors, tuple[torch.Tensor, torch.Tensor]]]) -> EntropyScale:
    """Over the tokens of all data- and context-parallel ranks; a collective of the last pipeline stage."""
    sums = [
        torch.stack([times_N.sum(), (times_N * entropy_N).sum(), (times_N * entropy_N * entropy_N).sum()])
        for times_N, entropy_N in ((row.multiplicity_N.double(), entropy_N.double()) for row, (_, entropy_N) in known)
    ]
    total = torch.stack(sums).sum(0)
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return EntropyScale.of_sums(*total.tolist())


def policy_loss(row: RowTensors, logprobs_N: torch.Tensor, entropy_N: torch.Tensor, loss: LossSettings) -> tuple[torch.Tensor, dict]:
    """The row's part of the mini-batch's loss, and its sums, counted with multiplicity: those of the flat batch."""
    clip = ClipSettings(low=loss.clip_low, high=loss.clip_high, dual=loss.dual_clip, keep_gradient=loss.aepo_clipping)
    now_N, times_N = logprobs_N.detach(), row.multiplicity_N
    old_N = now_N if row.old_logprobs_N is None else row.old_logprobs_N
    importance_N = importance_weights(old_N, row.rollout_logprobs_N, loss.importance_cap) if loss.importance_cap else None
    total = tree_policy_loss(logprobs_N, old_N, row.advantage_pos_N, row.advantage_neg_N, clip, importance_N)
    ratio_N, mismatch_N = (now_N - old_N).exp(), (old_N - row.rollout_logprobs_N).abs()
    sums = {
        "tokens": times_N.sum(),
        "unique_tokens": torch.tensor(float(len(times_N))),
        "row_tokens": torch.tensor(float(row.token_ids_1Q.numel())),
        "clipped": (times_N * ((ratio_N < 1.0 - clip.low) | (ratio_N > 1.0 + clip.high))).sum(),
        "ratio_kl": (times_N * (ratio_N - 1.0 - (now_N - old_N))).sum(),
        "entropy": (times_N * entropy_N).sum(),
        "mismatch": (times_N * mismatch_N).sum(),
        "importance_capped": (times_N * ((old_N - row.rollout_logprobs_N).exp() > (loss.importance_cap or float("inf")))).sum(),
        "mismatch_max": mismatch_N.max() if len(mismatch_N) else torch.zeros(()),
    }
    if loss.kl_coef:
        total = total + loss.kl_coef * kl_to_reference(logprobs_N, row.reference_logprobs_N, row.weight_N)
        sums["reference_kl"] = kl_to_reference(now_N, row.reference_logprobs_N, times_N)
    return total, {"loss": total.detach(), **sums}
