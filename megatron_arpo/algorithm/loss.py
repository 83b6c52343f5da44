"""The policy loss of one token, for a token that serves leaves with positive and with negative advantages at once.

Suffix T: targets of a packed row. Sums only: denominators are part of the advantages (algorithm/advantage.py). Every term is
positively homogeneous in the advantage on each sign, or linear in the leaves' weights, so that a token which several leaves share
carries sums over them and is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_STD_EPSILON = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipSettings:
    """eps_low, eps_high of the ratio's clip, the dual clip c (None: off), and whether clipped tokens with a positive advantage
    keep a gradient (AEPO)."""

    low: float
    high: float
    dual: float | None
    keep_gradient: bool = False


def clipped_loss(log_ratio_T: torch.Tensor, advantage_T: torch.Tensor, clip: ClipSettings) -> torch.Tensor:
    """max(-r A, -clip(r, 1 - low, 1 + high) A), bounded by c |A| where A < 0; r = exp(log_ratio), shape [T].

    PPO's surrogate (arXiv 1707.06347, eq. 7) with the dual clip of arXiv 1912.09729, eq. 8. With `keep_gradient` the upper bound
    is (1 + high) r / sg(r): the value is the same, the gradient that of a token at the bound (AEPO, arXiv 2510.14545).
    """
    ratio_T = log_ratio_T.exp()
    clipped_T = ratio_T.clamp(1.0 - clip.low, 1.0 + clip.high)
    if clip.keep_gradient:
        clipped_T = torch.where(ratio_T > 1.0 + clip.high, (1.0 + clip.high) * (log_ratio_T - log_ratio_T.detach()).exp(), clipped_T)
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
    log_ratio_T = logprobs_T - old_logprobs_T
    loss_T = clipped_loss(log_ratio_T, advantage_pos_T, clip) + clipped_loss(log_ratio_T, advantage_neg_T, clip)
    if importance_T is not None:
        loss_T = loss_T * importance_T
    return loss_T.sum()


def importance_weights(actor_logprobs_T: torch.Tensor, engine_logprobs_T: torch.Tensor, cap: float) -> torch.Tensor:
    """min(exp(actor - engine), cap) without gradient: truncated importance sampling against a mismatch of the two."""
    return (actor_logprobs_T - engine_logprobs_T).detach().exp().clamp(max=cap)


def kl_to_reference(logprobs_T: torch.Tensor, reference_logprobs_T: torch.Tensor, weight_T: torch.Tensor) -> torch.Tensor:
    """sum_t w_t (exp(d) - d - 1), d = reference - policy log-prob, a scalar: the estimator k3 of GRPO (arXiv 2402.03300, eq. 4).
    `weight_T` is the sum of the weights of the leaves through the token."""
    difference_T = reference_logprobs_T - logprobs_T
    return (weight_T * (difference_T.exp() - difference_T - 1.0)).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyScale:
    """Mean and standard deviation of the tokens' entropies over the whole batch, a token counted once for each leaf through it."""

    mean: float
    std: float

    @classmethod
    def of_sums(cls, count: float, total: float, squares: float) -> EntropyScale:
        """From sum n, sum n H and sum n H^2 with n the leaves through a token."""
        mean = total / count
        return cls(mean=mean, std=max(squares / count - mean * mean, 0.0) ** 0.5)


def entropy_scaled(
    advantage_pos_T: torch.Tensor, advantage_neg_T: torch.Tensor, entropy_T: torch.Tensor, scale: EntropyScale, weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A+ and A- of the leaves' advantages A (1 + weight z), z = (H - mean) / std without gradient (AEPO, arXiv 2510.14545).

    The factor is the token's, the same for all its leaves; where it is negative it turns positive advantages into negative ones.
    """
    factor_T = 1.0 + weight * (entropy_T.detach() - scale.mean) / (scale.std + _STD_EPSILON)
    turned_T = factor_T < 0
    return (
        factor_T * torch.where(turned_T, advantage_neg_T, advantage_pos_T),
        factor_T * torch.where(turned_T, advantage_pos_T, advantage_neg_T),
    )
