"""The policy loss of one token, for a token that serves leaves with positive and with negative advantages at once.

Suffix T: targets of a packed row. Sums only: denominators are part of the advantages (algorithm/advantage.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipSettings:
    """eps_low, eps_high of the ratio's clip, and the dual clip c (None: off)."""

    low: float
    high: float
    dual: float | None


def clipped_loss(ratio_T: torch.Tensor, advantage_T: torch.Tensor, clip: ClipSettings) -> torch.Tensor:
    """max(-r A, -clip(r, 1 - low, 1 + high) A), bounded by c |A| where A < 0; shape [T].

    PPO's surrogate (arXiv 1707.06347, eq. 7) with the dual clip of arXiv 1912.09729, eq. 8. Positively homogeneous in A.
    """
    clipped_T = ratio_T.clamp(1.0 - clip.low, 1.0 + clip.high)
    loss_T = torch.maximum(-ratio_T * advantage_T, -clipped_T * advantage_T)
    if clip.dual is None:
        return loss_T
    return torch.where(advantage_T < 0, torch.minimum(loss_T, -clip.dual * advantage_T), loss_T)


def tree_policy_loss(
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    advantage_pos_T: torch.Tensor,
    advantage_neg_T: torch.Tensor,
    clip: ClipSettings,
    importance_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """sum_t w_t [l(r_t, A+_t) + l(r_t, A-_t)], a scalar: exactly the sum over the leaves of the flat batch.

    `importance_T` are weights w_t without gradient (all 1 where None).
    """
    ratio_T = (logprobs_T - old_logprobs_T).exp()
    loss_T = clipped_loss(ratio_T, advantage_pos_T, clip) + clipped_loss(ratio_T, advantage_neg_T, clip)
    if importance_T is not None:
        loss_T = loss_T * importance_T
    return loss_T.sum()


def importance_weights(actor_logprobs_T: torch.Tensor, engine_logprobs_T: torch.Tensor, cap: float) -> torch.Tensor:
    """min(exp(actor - engine), cap) without gradient: truncated importance sampling against a mismatch of the two."""
    return (actor_logprobs_T - engine_logprobs_T).detach().exp().clamp(max=cap)
