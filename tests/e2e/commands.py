"""Running the command line as a user would, and finding what it left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLI = [sys.executable, "-m", "megatron_arpo.cli"]
PUBLISHED_DATA = Path(os.environ.get("MEGATRON_ARPO_TEST_DATA", ROOT.parent / "shared/data"))


class Command:
    """A started command; everything it starts carries a mark in its environment, by which it can be found."""

    def __init__(self, *arguments: str, deaf_to_sigint: bool = False, **environment: str) -> None:
        self._mark = f"MEGATRON_ARPO_TEST={uuid.uuid4().hex}"
        name, value = self._mark.split("=")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 read until the test ends
        self.process = subprocess.Popen(
            [*CLI, *arguments], cwd=ROOT, text=True, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=self._log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1", name: value, **environment},
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_IGN if deaf_to_sigint else signal.SIG_DFL),
        )  # fmt: skip

    def read(self) -> str:
        """All it has written so far."""
        with open(f"/proc/self/fd/{self._log.fileno()}") as log:
            return log.read()

    @property
    def output(self) -> str:
        return self.read()

    def wait_for(self, text: str, timeout_s: float = 180.0) -> None:
        self.wait_until(lambda: text in self.read(), timeout_s, repr(text))

    def wait_until(self, condition, timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}:\n{self.read()[-4000:]}"
            assert time.monotonic() < deadline, f"no {what} in {timeout_s} s:\n{self.read()[-4000:]}"
            time.sleep(0.05)

    def finish(self, timeout_s: float = 300.0) -> int:
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running after {timeout_s} s:\n{self.output[-4000:]}"
            time.sleep(0.05)
        return self.process.returncode

    def left_behind(self) -> list[str]:
        """Command lines of what still runs with the mark."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100])
            except OSError:
                continue
        return found

    def wait_until_nothing_is_left(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while left := self.left_behind():
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.2)

    def kill_hard(self) -> None:
        """SIGKILL to the command alone, as the kernel's out-of-memory killer would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def sweep(self) -> None:
        """Ends whatever is left, for the next test's sake."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
            except OSError:
                continue


def run(*arguments: str, timeout_s: float = 300.0, **environment: str) -> tuple[int, str]:
    """(exit code, output) of a command that ends by itself."""
    command = Command(*arguments, **environment)
    try:
        return command.finish(timeout_s), command.output
    finally:
        command.sweep()


@contextmanager
def small_disk(folder: Path, num_mib: int) -> Iterator[Path]:
    """A file system of `num_mib` MiB at the new `folder`; the test is skipped where none can be mounted."""
    if os.geteuid():
        pytest.skip("needs root to mount a small file system")
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_mib}m", "tmpfs", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
