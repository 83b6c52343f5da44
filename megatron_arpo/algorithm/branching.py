"""Who may fork and when (ARPO, arXiv 2507.19849): settings, the decision, the budget of forks, keyed random numbers.

Pure: `rollout/grow.py` asks here and starts the branches.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

from megatron_arpo.algorithm.entropy import PROBE_TOKENS

BranchKey = tuple[int, ...]
"""Names a branch by its descent, whatever the timing: (i,) is initial trajectory i; see `fork_key` and `fresh_key`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArpoBranching:
    """Entropy-guided forks: `num_initial` (N) trajectories from the prompt, `num_rollouts` (M) leaves in the end.

    A fork makes `beam_size` branches out of one. `alpha`, `beta` and `threshold` belong to probe entropies over
    `probe_tokens` tokens. `fork_budget` says who gets the M - N forks, see ForkBudget.

    Example, the published reasoning run: ArpoBranching(num_rollouts=16, num_initial=8)
    """

    num_rollouts: int
    num_initial: int
    beam_size: int = 2
    alpha: float = 0.5
    beta: float = 0.2
    probe_tokens: int = PROBE_TOKENS
    rule: Literal["bernoulli", "threshold"] = "bernoulli"
    threshold: float = 0.5
    fork_budget: Literal["shared", "keyed"] = "keyed"

    def __post_init__(self) -> None:
        if not 1 <= self.num_initial <= self.num_rollouts:
            raise ValueError(
                f"num_initial={self.num_initial} must be between 1 and num_rollouts={self.num_rollouts}: "
                "every initial trajectory is one of the rollouts"
            )
        if self.beam_size < 2:
            raise ValueError(f"beam_size={self.beam_size} must be at least 2; use NoBranching for no forks")
        if self.probe_tokens < 1:
            raise ValueError(f"probe_tokens={self.probe_tokens} must be at least 1")
        for name in ("alpha", "beta", "threshold"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number")
        if self.rule not in ("bernoulli", "threshold"):
            raise ValueError(f'rule={self.rule!r} must be "bernoulli" or "threshold"')
        if self.fork_budget not in ("shared", "keyed"):
            raise ValueError(f'fork_budget={self.fork_budget!r} must be "shared" or "keyed"')


@dataclass(frozen=True, slots=True, kw_only=True)
class NoBranching:
    """Plain GRPO: `num_rollouts` independent trajectories. Example: NoBranching(num_rollouts=8)"""

    num_rollouts: int

    def __post_init__(self) -> None:
        if self.num_rollouts < 1:
            raise ValueError(f"num_rollouts={self.num_rollouts} must be at least 1")


def fork_probability(settings: ArpoBranching, initial_entropy: float, entropy: float) -> float:
    """P = alpha + beta (H_t - H_initial), unclipped (arXiv 2507.19849, section 3.1, P_t = alpha + beta Delta H_t).

    Both entropies are probe entropies (sums over the first k tokens / log V), so Normalize() of the paper is in them
    already.

    Example: alpha 0.5, beta 0.2, H_initial 1.0, H_t 2.5 give P = 0.8.
    """
    return settings.alpha + settings.beta * (entropy - initial_entropy)


def decide(settings: ArpoBranching, initial_entropy: float, entropy: float, drawn: float) -> tuple[float, bool]:
    """The fork decision after one tool result: (the probability that was compared, whether to fork).

    - `bernoulli`, the published code: fork if `drawn`, uniform in [0, 1), is below P clipped to [0, 1].
    - `threshold`, the paper's Branch(Z) if P_t > tau: fork if the unclipped P is above it; `drawn` plays no part.

    Deviation from the published code: H_initial is the trajectory's own, and no baseline is kept between batches.
    """
    probability = fork_probability(settings, initial_entropy, entropy)
    if settings.rule == "threshold":
        return probability, probability > settings.threshold
    probability = min(1.0, max(0.0, probability))
    return probability, drawn < probability


class ForkBudget:
    """The M - N forks of one tree, and who may still spend them.

    - `shared`: one pool, first come first served, as published; who gets a fork depends on timing.
    - `keyed`: initial trajectory i owns (M - N) // N forks, one more if i < (M - N) % N. A fork splits what is left
      evenly between parent and children, the remainder stays with the parent. Nobody ever takes from another branch, so
      the tree does not depend on timing.

    Forks that a branch can no longer make come back from `end` as fresh trajectories from the prompt, so that every
    tree has exactly M leaves: in `keyed` as soon as their owner ends, in `shared` once the last branch has ended.

    Example: M=7, N=2, keyed: shares (3, 2). Branch (0,) forks (0, 1, 0): one fork is spent, 1 and 1 are left to the
    two.
    """

    def __init__(self, *, num_rollouts: int, num_initial: int, mode: Literal["shared", "keyed"]) -> None:
        share, extra = divmod(num_rollouts - num_initial, num_initial)
        self._num_initial = num_initial
        self._pool = num_rollouts - num_initial if mode == "shared" else 0
        self._shares: dict[BranchKey, int] = {(index,): share + (index < extra) if mode == "keyed" else 0 for index in range(num_initial)}

    @classmethod
    def of(cls, settings: ArpoBranching | NoBranching) -> ForkBudget:
        match settings:
            case ArpoBranching(num_rollouts=num_rollouts, num_initial=num_initial, fork_budget=mode):
                return cls(num_rollouts=num_rollouts, num_initial=num_initial, mode=mode)
            case NoBranching(num_rollouts=num_rollouts):
                return cls(num_rollouts=num_rollouts, num_initial=num_rollouts, mode="keyed")

    def branches(self) -> tuple[BranchKey, ...]:
        """Keys of the branches that have not ended; at first, the initial trajectories."""
        return tuple(self._shares)

    def left(self, branch: BranchKey) -> int:
        """How many siblings `branch` could start now."""
        return self._pool + self._shares[branch]

    def fork(self, branch: BranchKey, turn: int, num_wanted: int) -> tuple[BranchKey, ...]:
        """Spends up to `num_wanted` forks of `branch`; returns the keys of the siblings to start."""
        granted = min(num_wanted, self.left(branch))
        children = tuple(fork_key(branch, turn, sibling) for sibling in range(granted))
        share = 0
        if self._shares[branch] > 0:
            share, extra = divmod(self._shares[branch] - granted, granted + 1)
            self._shares[branch] = share + extra
        else:
            self._pool -= granted
        self._shares.update(dict.fromkeys(children, share))
        return children

    def end(self, branch: BranchKey) -> tuple[BranchKey, ...]:
        """Notes that `branch` has ended; returns the keys of the fresh trajectories to start for its unused forks."""
        unused = self._shares.pop(branch)
        if not self._shares:
            unused, self._pool = unused + self._pool, 0
        fresh = tuple(fresh_key(self._num_initial, branch, index) for index in range(unused))
        self._shares.update(dict.fromkeys(fresh, 0))
        return fresh


def fork_key(parent: BranchKey, turn: int, sibling: int) -> BranchKey:
    """Key of a sibling that starts where `parent` has `turn` tool results behind it. Sorts behind its parent."""
    return (*parent, turn, sibling)


def fresh_key(num_initial: int, ended: BranchKey, index: int) -> BranchKey:
    """Key of a fresh trajectory for a fork that `ended` left over. Sorts behind all initial trajectories and forks."""
    return (num_initial, *ended, index)


def keyed_uniform(seed: int, prompt_id: str, branch: BranchKey, turn: int) -> float:
    """The uniform number in [0, 1) of one fork decision; the same in every process and Python version."""
    return (_keyed_bits("fork", seed, prompt_id, branch, turn) >> 11) / 2**53


def keyed_seed(seed: int, prompt_id: str, branch: BranchKey, turn: int) -> int:
    """The engine's seed of one generation, in [0, 2^63)."""
    return _keyed_bits("generate", seed, prompt_id, branch, turn) >> 1


def _keyed_bits(purpose: str, seed: int, prompt_id: str, branch: BranchKey, turn: int) -> int:
    """64 bits from a stable hash; repr() of the tuple keeps its parts apart."""
    key = repr((purpose, seed, prompt_id, branch, turn)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
