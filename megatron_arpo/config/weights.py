"""How the engine's weights follow the actor's, and how that is checked."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_arpo.config.base import Settings


class WeightSettings(Settings):
    verify: Literal["checksum", "logprob"] = "logprob"
    """checksum: every tensor's bytes; logprob: that, and after each sync both sides score the same tokens."""

    verify_sequences: int = Field(default=8, ge=1)
    """Sequences scored by both sides after a sync."""

    max_logprob_diff: float = Field(default=1e-3, gt=0)
    """Bound on the largest difference with model.dtype=float32; past it the run stops."""

    mean_logprob_diff: float = Field(default=0.02, gt=0)
    """Bound on the mean difference with model.dtype=bfloat16; past it the run stops."""
