"""What growing a tree is given: how turns are written, tools run and tokens drawn, and one trajectory's limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_arpo.types import ToolCall, ToolResult

RunTool = Callable[[ToolCall], Awaitable[ToolResult]]
"""Makes one tool call; a failing tool is a result with a status, an exception is broken infrastructure."""


class TurnCodec(Protocol):
    """How turns are written in tokens: the tool tags and the tokenizer, as the grower needs them."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Closing tags of the enabled tools; generation ends behind them."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def encode_result(self, text: str) -> tuple[int, ...]:
        """Tokens that are appended for a tool's answer, its tags included."""
        ...

    def parse(self, text: str) -> ToolCall | None:
        """The call that one turn's text ends in; None if it is none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """Bounds of one trajectory. `max_response_tokens` counts all tokens behind the prompt, tool results included.

    Example: RolloutLimits(max_response_tokens=4096, max_tool_calls=3)
    """

    max_response_tokens: int
    max_tool_calls: int

    def __post_init__(self) -> None:
        if self.max_response_tokens < 1:
            raise ValueError(f"max_response_tokens={self.max_response_tokens} must be at least 1")
        if self.max_tool_calls < 0:
            raise ValueError(f"max_tool_calls={self.max_tool_calls} must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How tokens are drawn; `temperature=0` is greedy. Example: SamplingSettings(temperature=1.0, top_p=1.0)"""

    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature={self.temperature} must be at least 0")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
