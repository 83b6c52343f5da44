"""Where prompts come from."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from megatron_arpo.config.base import Settings


class DataSettings(Settings):
    train: Path | None = None
    """Prompts to train on: parquet in the published format, or jsonl."""

    valid: Path | None = None
    """Held-out prompts for evaluation; none skips evaluation."""

    max_prompt_tokens: int = Field(default=1536, gt=0)
    """Longer prompts are dropped and counted, never cut. 1536 is the published limit for reasoning."""
