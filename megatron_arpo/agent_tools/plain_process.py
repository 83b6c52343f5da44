"""Programs in plain subprocesses: limits on memory and time, no walls. What `tools.python.sandbox: none` asks for."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from pathlib import Path

from megatron_arpo.agent_tools.sandbox import ENVIRONMENT, file_of
from megatron_arpo.agent_tools.sandbox_output import OutputReader, ProgramOutcome


class PlainProcess:
    """Runs each program in a new interpreter with an empty environment; it may touch what this user may."""

    def __init__(self, *, memory_mb: int, max_output_bytes: int) -> None:
        self._memory_bytes = memory_mb << 20
        self._max_output_bytes = max_output_bytes

    async def start(self) -> None:
        """There is nothing to keep warm."""

    async def run(self, code: str, timeout_s: float) -> ProgramOutcome:
        program = file_of(code)
        pipes = [os.pipe(), os.pipe()]
        script = str(Path(__file__).parent / "sandbox_program.py")
        limits = (str(self._memory_bytes), str(math.ceil(timeout_s) + 1))
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-B", "-X", "utf8", script, str(program), *limits),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=pipes[0][1],
                stderr=pipes[1][1],
                pass_fds=(program,),
                env=ENVIRONMENT,
                cwd="/tmp",
                start_new_session=True,
            )
        except BaseException:
            for read_end, _ in pipes:
                os.close(read_end)
            raise
        finally:
            for file in (program, pipes[0][1], pipes[1][1]):
                os.close(file)

        def kill() -> None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

        stdout = OutputReader(pipes[0][0], self._max_output_bytes, "start", kill)
        stderr = OutputReader(pipes[1][0], self._max_output_bytes, "end", kill)
        overdue = False
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            overdue = True
        finally:
            kill()
            texts = stdout.finish(), stderr.finish()
        flooded = stdout.flooded or stderr.flooded
        return ProgramOutcome(
            stdout=texts[0],
            stderr=texts[1],
            exit_code=await process.wait(),
            ended="deadline" if overdue else "output" if flooded else "itself",
            stdout_cut=stdout.cut,
        )

    async def close(self) -> None:
        """Every call has ended its own processes."""
