"""The <python> tool: runs the model's program and answers with what it printed, or with its traceback."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from collections.abc import Sequence
from typing import Literal

from megatron_arpo.agent_tools.plain_process import PlainProcess
from megatron_arpo.agent_tools.sandbox import BubblewrapSandbox
from megatron_arpo.agent_tools.sandbox_output import ProgramOutcome
from megatron_arpo.types import ToolResult, ToolStatus

logger = logging.getLogger(__name__)

SELF_TEST_TIMEOUT_S = 30.0
SELF_TEST = """
import json, os, socket
try:
    # A UDP socket connects without sending anything, if there is a route.
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("192.0.2.1", 9))
    network = True
except OSError:
    network = False
json.dumps({"two": 1 + 1, "uid": os.getuid(), "network": network})
"""


class PythonTool:
    """Each call is a program of its own: nothing survives it. Start, call and close on the same event loop.

    A call succeeds with the stripped stdout, where an expression at the program's end is printed as in a notebook; a
    program that fails answers with its stripped stderr. `memory_mb` bounds the address space, `max_output_bytes` what
    is kept of each stream, `preload` names modules that the sandbox imports once for all calls.

    Example: await PythonTool(max_concurrent=8).call("2 + 3", timeout_s=5) is ToolResult(text="5", status="ok", ...).
    """

    name = "python"

    def __init__(
        self,
        *,
        max_concurrent: int,
        memory_mb: int = 512,
        max_output_bytes: int = 16384,
        preload: Sequence[str] = (),
        sandbox: Literal["bubblewrap", "none"] = "bubblewrap",
    ) -> None:
        if max_concurrent < 1:
            raise ValueError(f"tools.max_concurrent={max_concurrent} must be at least 1")
        self._sandbox = sandbox
        self._sandboxed = sandbox == "bubblewrap"
        self._runner: BubblewrapSandbox | PlainProcess
        if self._sandboxed:
            self._runner = BubblewrapSandbox(memory_mb=memory_mb, max_output_bytes=max_output_bytes, preload=preload)
        else:
            self._runner = PlainProcess(memory_mb=memory_mb, max_output_bytes=max_output_bytes)
        self._slots = asyncio.Semaphore(max_concurrent)

    async def start(self) -> None:
        """Starts the sandbox and proves that it holds; RuntimeError with the reason and the fix where it does not."""
        if not self._sandboxed:
            logger.warning("tools.python.sandbox=none: PROGRAMS WRITTEN BY THE MODEL RUN UNPROTECTED, with this user's files and network")
        try:
            await self._runner.start()
            await self._test_itself()
        except (RuntimeError, OSError) as error:
            await self._runner.close()
            raise RuntimeError(f"tools.python.sandbox={self._sandbox}: {error}; or set tools.python.sandbox: none, unprotected") from error

    async def call(self, code: str, timeout_s: float) -> ToolResult:
        """Runs `code`; waiting for a free slot counts towards `timeout_s`.

        RuntimeError: the sandbox is broken and a restart did not help.
        """
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            return ToolResult(text=_timeout_text(timeout_s), status="timeout", latency_s=time.monotonic() - started)
        try:
            outcome = await self._runner.run(code, max(0.0, started + timeout_s - time.monotonic()))
        finally:
            self._slots.release()
        text, status = _answer(outcome, timeout_s)
        return ToolResult(text=text, status=status, latency_s=time.monotonic() - started)

    async def close(self) -> None:
        """Leaves no process."""
        await self._runner.close()

    async def _test_itself(self) -> None:
        outcome = await self._runner.run(SELF_TEST, SELF_TEST_TIMEOUT_S)
        if outcome.ended != "itself" or outcome.exit_code != 0:
            raise RuntimeError(f"the self-test failed: {_answer(outcome, SELF_TEST_TIMEOUT_S)[0]}")
        found = json.loads(outcome.stdout)
        if found["two"] != 2:
            raise RuntimeError(f"the self-test computed 1 + 1 = {found['two']}")
        if self._sandboxed and found["uid"] == 0:
            raise RuntimeError("the self-test ran as uid 0")
        if self._sandboxed and found["network"]:
            raise RuntimeError("the self-test could see the network")


def _answer(outcome: ProgramOutcome, timeout_s: float) -> tuple[str, ToolStatus]:
    """What the model reads of a program that ended this way."""
    if outcome.ended == "deadline":
        return _timeout_text(timeout_s), "timeout"
    printed = outcome.stdout.strip()
    if outcome.ended == "output":
        return f"{printed}\n[output cut; the program was stopped because it wrote too much]", "error"
    if outcome.exit_code == 0:
        return (f"{printed}\n[output cut]" if outcome.stdout_cut else printed), "ok"
    return outcome.stderr.strip() or _ending(outcome.exit_code), "error"


def _timeout_text(timeout_s: float) -> str:
    return f"The program was stopped: it ran for more than {timeout_s:g} seconds."


def _ending(exit_code: int) -> str:
    if exit_code >= 0:
        return f"The program ended with exit code {exit_code} and no message."
    return f"The program was killed by signal {signal.Signals(-exit_code).name}."
