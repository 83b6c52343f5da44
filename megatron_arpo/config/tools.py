"""The tools the model may call, and the limits on them. Keys of remote services come from the environment, never from here."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from megatron_arpo.config.base import Settings


class PythonToolSettings(Settings):
    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """none runs model code unprotected, with a warning."""

    memory_mb: int = Field(default=512, ge=64)
    """Address space of one call."""

    max_output_bytes: int = Field(default=16384, ge=64)
    """More output than this is cut, visibly."""

    preload: tuple[str, ...] = ()
    """Modules imported once and shared by all calls; saves their import time in each."""


class SearchToolSettings(Settings):
    cache_path: Path
    """Search cache in the published form: a JSON object from query to result text."""

    corpus_path: Path | None = None
    """jsonl of passages for the BM25 index that answers when the cache misses; none indexes the cache's own passages."""

    top_k: int = Field(default=5, ge=1)
    """Passages a search returns from the index."""


class ToolSettings(Settings):
    python: PythonToolSettings | None = None
    """The <python> tool; null switches it off."""

    search: SearchToolSettings | None = None
    """The <search> tool; null switches it off."""

    max_calls: int = Field(default=3, ge=0)
    """Calls a trajectory may make; one that asks for more ends there."""

    timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of one call."""

    num_tries: int = Field(default=3, ge=1)
    """Tries where a tool's infrastructure fails."""

    max_concurrent: int = Field(default=64, ge=1)
    """Calls that run at the same time."""

    max_result_chars: int = Field(default=8000, ge=16)
    """Longer results are cut, visibly to the model."""
