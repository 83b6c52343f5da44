"""How trees grow and what the loss is. Formulas stand in megatron_arpo/algorithm."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_arpo.config.base import Settings


class ArpoRollout(Settings):
    kind: Literal["arpo"] = "arpo"

    num_rollouts: int = Field(default=16, ge=2)
    """M: trajectories a prompt ends with."""

    num_initial: int = Field(default=8, ge=1)
    """N: trajectories that start at the prompt; M - N are left for forks."""

    beam_size: int = Field(default=2, ge=2)
    """A fork starts beam_size - 1 siblings."""

    alpha: float = 0.5
    """Base probability of a fork (published: branch_probability)."""

    beta: float = 0.2
    """Weight of the entropy change (published: entropy_weight)."""

    rule: Literal["bernoulli", "threshold"] = "bernoulli"
    """bernoulli: fork with probability clip(P, 0, 1), as the published code; threshold: fork if P > threshold, as the paper."""

    threshold: float = 0.5
    """tau of the threshold rule."""

    probe_tokens: int = Field(default=20, ge=1)
    """k: tokens after a tool result over which entropy is summed."""

    fork_budget: Literal["shared", "keyed"] = "keyed"
    """shared: first come, as published; keyed: each initial trajectory owns a share, so timing can't change the tree."""

    @model_validator(mode="after")
    def _initial_within_budget(self) -> ArpoRollout:
        if self.num_initial > self.num_rollouts:
            raise ValueError(f"num_initial={self.num_initial} must not exceed num_rollouts={self.num_rollouts}; lower num_initial")
        return self


class GrpoRollout(Settings):
    kind: Literal["grpo"] = "grpo"

    num_rollouts: int = Field(default=16, ge=2)
    """Independent trajectories a prompt."""


RolloutPolicy = Annotated[ArpoRollout | GrpoRollout, Field(discriminator="kind")]


class LossSettings(Settings):
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """eps_low: the ratio is clipped below 1 - clip_low."""

    clip_high: float = Field(default=0.2, gt=0)
    """eps_high: the ratio is clipped above 1 + clip_high."""

    dual_clip: float | None = Field(default=3.0, gt=1)
    """c: bounds the loss of a token with negative advantage at c |A|; null switches it off."""

    aepo_clipping: bool = False
    """Tokens above 1 + clip_high with a positive advantage keep a gradient, rescaled to the bound (AEPO, arXiv 2510.14545)."""

    entropy_advantage: float = Field(default=0.0, ge=0)
    """A <- A (1 + this * z), z the token's standardised entropy (AEPO uses 0.2, arXiv 2510.14545); costs a forward pass."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference policy, the weights of model.path; above 0 it is held in host memory and swapped in."""

    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = "token-mean"
    """How token losses become one number; denominators are those of the flat batch."""

    importance_cap: float | None = Field(default=2.0, gt=0)
    """Cap of the truncated importance weight exp(actor - engine log-prob) against engine mismatch; null: not applied."""


class AlgorithmSettings(Settings):
    rollout: RolloutPolicy = ArpoRollout()
    """ARPO's branching or GRPO's independent trajectories."""

    attribution: Literal["soft", "hard"] = "soft"
    """soft: each trajectory keeps its advantage on its whole path; hard: a shared token gets the mean of those below it."""

    loss: LossSettings = LossSettings()
