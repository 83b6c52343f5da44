"""Between the rollout and the tools: limits, deadlines, retries and counts around every call."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import defaultdict
from collections.abc import Mapping

from megatron_arpo.agent_tools.base import Tool
from megatron_arpo.agent_tools.parse import cut_text
from megatron_arpo.types import ToolCall, ToolResult

DEADLINE_GRACE_S = 20.0
"""A tool ends its own work at the deadline and says how far it came; only one that fails to in this time is cut off."""


class ToolRunner:
    """Makes the rollout's tool calls. What a tool answers is a result and never retried, failing programs included.

    Retried, up to `num_tries` in all, is a tool whose infrastructure fails: one that raises OSError or RuntimeError, or
    answers with status "unavailable". When the tries are spent, the last exception goes up, the last answer goes to the
    model. `max_concurrent` bounds the calls that run, `timeout_s` each try, `max_result_chars` the text the model gets.

    Example: await ToolRunner({"python": tool}, timeout_s=120, num_tries=3, max_concurrent=64,
    max_result_chars=8000).call(ToolCall(name="python", arguments="1+1")) is ToolResult(text="2", status="ok", ...).
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        *,
        timeout_s: float,
        num_tries: int,
        max_concurrent: int,
        max_result_chars: int,
        retry_delay_s: float = 0.5,
        deadline_grace_s: float = DEADLINE_GRACE_S,
    ) -> None:
        for field, value in (("timeout_s", timeout_s), ("num_tries", num_tries), ("max_concurrent", max_concurrent)):
            if value <= 0:
                raise ValueError(f"tools.{field}={value} must be positive")
        self._tools = dict(tools)
        self._timeout_s = timeout_s
        self._num_tries = num_tries
        self._max_result_chars = max_result_chars
        self._retry_delay_s = retry_delay_s
        self._deadline_grace_s = deadline_grace_s
        self._slots = asyncio.Semaphore(max_concurrent)
        self._counts: defaultdict[str, float] = defaultdict(float)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools that can be called."""
        return tuple(self._tools)

    async def call(self, call: ToolCall) -> ToolResult:
        """Answers one call; its latency counts from the first try and leaves out the wait for a free slot.

        A tool that does not exist answers with status "unavailable". OSError or RuntimeError: the tool's infrastructure
        is broken.
        """
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            result = ToolResult(text=f"There is no tool {call.name!r}; there is: {known}.", status="unavailable")
        else:
            async with self._slots:
                result = await self._with_retries(tool, call)
        self._count(call.name if tool is not None else "unknown", result)
        return dataclasses.replace(result, text=cut_text(result.text, self._max_result_chars))

    def metrics(self) -> dict[str, float]:
        """Counts since the last time, which this resets.

        `<tool>/calls`, a `<tool>/<status>` for each status that occurred, `<tool>/cached`, `<tool>/retries`,
        `<tool>/latency_s` in total and, apart from the calls, `<tool>/broken`: those whose exception went up.
        """
        counts = dict(self._counts)
        self._counts.clear()
        return counts

    async def close(self) -> None:
        """Closes every tool, also where one of them fails to; the first failure goes up."""
        outcomes = await asyncio.gather(*(tool.close() for tool in self._tools.values()), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _with_retries(self, tool: Tool, call: ToolCall) -> ToolResult:
        started = time.monotonic()
        num_tries = 0
        while True:
            num_tries += 1
            try:
                result = await self._one_try(tool, call)
            except (OSError, RuntimeError):
                if num_tries == self._num_tries:
                    self._counts[f"{call.name}/broken"] += 1
                    raise
            else:
                if result.status != "unavailable" or num_tries == self._num_tries:
                    return dataclasses.replace(result, latency_s=time.monotonic() - started, num_tries=num_tries)
            await asyncio.sleep(self._retry_delay_s * 2 ** (num_tries - 1))

    async def _one_try(self, tool: Tool, call: ToolCall) -> ToolResult:
        try:
            return await asyncio.wait_for(tool.call(call.arguments, self._timeout_s), self._timeout_s + self._deadline_grace_s)
        except TimeoutError:
            return ToolResult(text=f"The tool did not answer within {self._timeout_s:g} seconds.", status="timeout")

    def _count(self, name: str, result: ToolResult) -> None:
        self._counts[f"{name}/calls"] += 1
        self._counts[f"{name}/{result.status}"] += 1
        self._counts[f"{name}/cached"] += result.cached
        self._counts[f"{name}/retries"] += result.num_tries - 1
        self._counts[f"{name}/latency_s"] += result.latency_s
