"""Cold-start supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from megatron_arpo.config.base import Settings


class SftSettings(Settings):
    demonstrations: Path
    """ShareGPT jsonl or json. <result> spans are out of the loss, since no model writes them."""

    num_epochs: int = Field(default=3, ge=1)

    batch_size: int = Field(default=128, ge=1)
    """Demonstrations an update."""

    max_tokens: int = Field(default=15000, ge=16)
    """Longer demonstrations are dropped and counted."""

    warmup_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of the updates over which the learning rate rises; overrides actor.optimizer.warmup_updates."""
