import asyncio
import time

import pytest

from megatron_arpo.agent_tools.runner import ToolRunner
from megatron_arpo.types import ToolCall, ToolResult

OK = ToolResult(text="fine", status="ok")


class ScriptedTool:
    """Answers with what its script holds next: a result, an exception to raise, or seconds to sleep."""

    def __init__(self, *script, name="python"):
        self.name = name
        self.script = list(script)
        self.num_calls = 0
        self.running = 0
        self.most_running = 0
        self.closed = False

    async def call(self, arguments, timeout_s):
        self.num_calls += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
            if isinstance(step, float):
                await asyncio.sleep(step)
                return OK
            if isinstance(step, Exception):
                raise step
            return step
        finally:
            self.running -= 1

    async def close(self):
        self.closed = True
        if self.script and self.script[0] == "fail to close":
            raise RuntimeError("stuck")


def runner(*tools, **changes):
    settings = {"timeout_s": 5, "num_tries": 3, "max_concurrent": 4, "max_result_chars": 100, "retry_delay_s": 0.0}
    return ToolRunner({tool.name: tool for tool in tools}, **(settings | changes))


def call(running, name="python"):
    return asyncio.run(running.call(ToolCall(name=name, arguments="1 + 1")))


def test_an_answer_is_passed_on():
    running = runner(ScriptedTool(OK), ScriptedTool(OK, name="search"))
    assert running.names == ("python", "search")
    result = call(running)
    assert (result.text, result.status, result.num_tries) == ("fine", "ok", 1)


@pytest.mark.parametrize("status", ["error", "timeout", "ok"])
def test_what_a_program_does_is_not_retried(status):
    tool = ScriptedTool(ToolResult(text="Traceback", status=status))
    assert call(runner(tool)).status == status
    assert tool.num_calls == 1


@pytest.mark.parametrize("failure", [RuntimeError("died"), ConnectionError("lost"), ToolResult(text="503", status="unavailable")])
def test_infrastructure_is_retried(failure):
    tool = ScriptedTool(failure, failure, OK)
    running = runner(tool)
    result = call(running)
    assert (result.status, result.num_tries, tool.num_calls) == ("ok", 3, 3)
    assert running.metrics()["python/retries"] == 2


def test_when_the_tries_are_spent():
    broken = runner(ScriptedTool(RuntimeError("died")))
    with pytest.raises(RuntimeError, match="died"):
        call(broken)
    assert broken.metrics() == {"python/broken": 1}
    away = ToolResult(text="503", status="unavailable")
    result = call(runner(ScriptedTool(away)))
    assert (result.text, result.status, result.num_tries) == ("503", "unavailable", 3)


def test_a_mistake_in_a_tool_is_not_retried():
    tool = ScriptedTool(TypeError("oops"))
    with pytest.raises(TypeError):
        call(runner(tool))
    assert tool.num_calls == 1


def test_a_tool_that_hangs_is_cut_off():
    tool = ScriptedTool(60.0)
    running = runner(tool, timeout_s=0.05, deadline_grace_s=0.05)
    started = time.monotonic()
    result = call(running)
    assert result.status == "timeout" and "0.05 seconds" in result.text
    assert 0.1 <= result.latency_s <= time.monotonic() - started < 5
    assert tool.running == 0
    assert running.metrics()["python/timeout"] == 1


def test_no_more_calls_run_than_allowed():
    tool = ScriptedTool(0.01)
    running = runner(tool, max_concurrent=3)

    async def many():
        return await asyncio.gather(*(running.call(ToolCall(name="python", arguments=str(index))) for index in range(12)))

    assert len(asyncio.run(many())) == 12
    assert tool.most_running == 3


def test_an_unknown_tool_is_unavailable():
    running = runner(ScriptedTool(OK))
    result = call(running, "browse")
    assert result.status == "unavailable" and "'browse'" in result.text and "python" in result.text
    assert running.metrics()["unknown/unavailable"] == 1


def test_long_results_are_cut_visibly():
    result = call(runner(ScriptedTool(ToolResult(text="x" * 1000, status="ok")), max_result_chars=20))
    assert len(result.text) == 20 and result.text.endswith("[... cut]")


def test_metrics_are_taken_and_reset():
    tool = ScriptedTool(OK, ToolResult(text="e", status="error"), ToolResult(text="c", status="ok", cached=True))
    running = runner(tool)
    for _ in range(3):
        call(running)
    counts = running.metrics()
    assert counts.pop("python/latency_s") >= 0
    assert counts == {"python/calls": 3, "python/ok": 2, "python/error": 1, "python/cached": 1, "python/retries": 0}
    assert running.metrics() == {}


def test_close_reaches_every_tool():
    tools = ScriptedTool("fail to close"), ScriptedTool(OK, name="search")
    with pytest.raises(RuntimeError, match="stuck"):
        asyncio.run(runner(*tools).close())
    assert all(tool.closed for tool in tools)


@pytest.mark.parametrize("field", ["timeout_s", "num_tries", "max_concurrent"])
def test_settings_must_be_positive(field):
    with pytest.raises(ValueError, match=f"tools.{field}=0 must be positive"):
        runner(ScriptedTool(OK), **{field: 0})
