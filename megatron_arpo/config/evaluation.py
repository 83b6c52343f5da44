"""How held-out prompts are scored."""

from __future__ import annotations

from pydantic import Field

from megatron_arpo.config.base import Settings
from megatron_arpo.config.rollout import SamplingSettings


class EvalSettings(Settings):
    num_prompts: int | None = Field(default=None, ge=1)
    """First so many held-out prompts; null takes all."""

    every_steps: int = Field(default=5, ge=0)
    """Training steps between evaluations; 0 evaluates before the first and after the last step only."""

    sampling: SamplingSettings = SamplingSettings(temperature=0.0)
    """Greedy by default, as published."""

    without_tools: bool = False
    """Also evaluate with every tool switched off, before the first and after the last step."""
