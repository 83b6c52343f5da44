"""Token entropy from the K largest log-probs with a bound on its error; the probe entropy that fork decisions read."""

from __future__ import annotations

import math
from collections.abc import Sequence

PROBE_TOKENS = 20
"""k of the published ARPO code: how many generated tokens a probe entropy is summed over."""

_ROUNDING = 1e-3
"""Slack for log-probs computed in float32 or bfloat16; more than that is a wrong list, not rounding."""


def entropy_from_logprobs(top_logprobs: Sequence[float], vocab_size: int) -> tuple[float, float]:
    """Entropy of one token's distribution in nats, and a bound on how far that estimate may be off.

    `top_logprobs` are the K largest natural log-probs at sampling temperature, in any order, out of V = `vocab_size`.

    H = -sum_v p_v log p_v (arXiv 2507.19849, section 3.1) is known on the K listed tokens. The other R = V - K are one
    lump of mass q = 1 - sum of the listed p. What that lump adds, T, is bounded on both sides:

    - Entropy is concave, so T is largest when q is spread evenly: T <= q log(R / q).
    - It is smallest at a corner of {0 <= t_j <= m, sum_j t_j = q}, m being the smallest listed p, which no tail token
      exceeds: floor(q / m) tokens hold m, one holds the rest r: T >= -floor(q / m) m log m - r log r. (Without the cap
      m the corner is one token with all of q, T >= -q log q, which is lower.)

    The estimate takes the middle of the two, so the error is at most half their distance: no other estimate has a
    smaller bound. K = V is exact, error 0. Deviation: the published code drops the tail and keeps K = 10.

    Example: p = (0.5, 0.25) of V = 4 leaves q = 0.25 for two tokens of at most 0.25 each: T is between 0.25 log 4 and
    0.25 log 8, so H = 1.1264 +- 0.0866 nats.
    """
    if not 1 <= len(top_logprobs) <= vocab_size:
        raise ValueError(f"{len(top_logprobs)} top log-probs for vocab_size={vocab_size}; need between 1 and vocab_size")
    if max(top_logprobs) > _ROUNDING:
        raise ValueError(f"log-prob {max(top_logprobs)} is above 0; pass natural logs of probabilities, not logits")
    probabilities = [math.exp(logprob) for logprob in top_logprobs]
    head = -math.fsum(p * logprob for p, logprob in zip(probabilities, top_logprobs, strict=True) if p > 0.0)
    listed = math.fsum(probabilities)
    if not listed <= 1.0 + _ROUNDING:
        raise ValueError(f"the top log-probs sum to probability {listed:.6f}; they must sum to at most 1")
    tail_tokens = vocab_size - len(top_logprobs)
    if tail_tokens == 0:
        return head, 0.0
    least, most = _tail_bounds(max(0.0, 1.0 - listed), tail_tokens, min(probabilities))
    return head + (least + most) / 2, (most - least) / 2


def _tail_bounds(mass: float, num_tokens: int, largest: float) -> tuple[float, float]:
    """Least and most that `num_tokens` probabilities of at most `largest`, summing to `mass`, add to an entropy."""
    room = num_tokens * largest
    if mass > room + _ROUNDING:
        raise ValueError(
            f"probability {mass:.6f} is left for {num_tokens} unlisted tokens of at most {largest:.6g} each; "
            "pass the largest log-probs of the full distribution"
        )
    mass = min(mass, room)
    if mass <= 0.0:
        return 0.0, 0.0
    num_full = math.floor(mass / largest)
    rest = max(0.0, mass - num_full * largest)
    least = _nats(rest) + num_full * _nats(largest)
    most = mass * math.log(num_tokens / mass)
    return min(least, most), most


def _nats(probability: float) -> float:
    return -probability * math.log(probability) if probability > 0.0 else 0.0


def probe_entropy(entropies: Sequence[float], k: int, vocab_size: int) -> float:
    """(Sum of the first `k` entropies in nats) / log V; fewer than `k` tokens: those there are.

    H_t and H_initial of arXiv 2507.19849, section 3.1. The sum, not the mean, is the published scale, the one alpha and
    beta belong to. Deviations from the published code: the full vocabulary instead of the top 10 tokens, and the tokens
    *after* the tool result (as in the paper) instead of those before the call. Being linear, it turns error bounds of
    the entropies into the error bound of the probe.

    Example: probe_entropy([log 4, log 4, 9.0], k=2, vocab_size=16) == 1.0.
    """
    if vocab_size < 2:
        raise ValueError(f"vocab_size={vocab_size} has no entropy to normalise by; it must be at least 2")
    if k < 1:
        raise ValueError(f"k={k} probe tokens; it must be at least 1")
    return math.fsum(entropies[:k]) / math.log(vocab_size)
