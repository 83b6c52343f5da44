"""Cold-start supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from megatron_arpo.config.base import Settings


class SftSettings(Settings):
    demonstrations: Path
    """A .jsonl, .json or .parquet file of ShareGPT or Alpaca rows, or LLaMA-Factory's dataset_info.json or its folder."""

    dataset: str | None = None
    """What to take from a dataset_info.json; several names with commas between them."""

    learn: Literal["all_turns", "last_turn"] = "all_turns"
    """Which of a conversation's answers are in the loss. all_turns is what LLaMA-Factory does, which made the published cold
    starts; it needs a chat template that only appends."""

    learn_results: bool = False
    """Whether <result> spans are in the loss, which no model writes."""

    num_epochs: int = Field(default=3, ge=1)

    batch_size: int = Field(default=128, ge=1)
    """Demonstrations an update."""

    max_tokens: int = Field(default=15000, ge=16)
    """Longer demonstrations are dropped and counted."""

    warmup_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of the updates over which the learning rate rises; overrides actor.optimizer.warmup_updates."""

    loader: Literal["torch", "dali"] = "torch"
    """Who fetches batches: torch's DataLoader or NVIDIA DALI (extra [dali]); the batches are the same bit for bit."""

    loader_workers: int = Field(default=1, ge=0)
    """Processes that fetch batches ahead, so that a slow disk is not waited for; 0 fetches in the run's own process, which is
    quickest where the tokenised sequences (5 bytes a token) fit in the page cache."""
