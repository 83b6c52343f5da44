"""The Tool role: text between two tags in, text for the model out."""

from __future__ import annotations

from typing import Protocol

from megatron_arpo.types import ToolResult


class Tool(Protocol):
    """A tool the model calls by writing <name>arguments</name>. A failing tool is a ToolResult with a status."""

    name: str

    async def call(self, arguments: str, timeout_s: float) -> ToolResult:
        """Runs once. Must return within about `timeout_s` seconds with status "timeout" where it could not finish."""
        ...

    async def close(self) -> None: ...
