"""The host's side of the bubblewrap sandbox: starts the warm zygote process and has it run programs.

What a program may see is decided here (the mounts) and in sandbox_zygote.py (namespaces, limits, user).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_arpo.agent_tools.sandbox_output import OutputReader, ProgramOutcome

START_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 10.0
REPORT_GRACE_S = 15.0
MESSAGE_BYTES = 65536
SANDBOX_FOLDER = "/sandbox"
PACKAGES_FOLDER = "/sandbox-packages"
SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}
"""All a program finds in its environment. One thread each: the zygote must have none when it forks."""


NAMESPACES_FIX = (
    "allow user namespaces (Docker: --security-opt seccomp=unconfined --security-opt systempaths=unconfined; hosts: "
    "sysctl user.max_user_namespaces above 0, kernel.apparmor_restrict_unprivileged_userns=0)"
)


class SandboxDiedError(RuntimeError):
    """The zygote process ended while it was needed."""


class BubblewrapSandbox:
    """Runs programs, each in namespaces of its own, from one warm process. All on one event loop."""

    def __init__(self, *, memory_mb: int, max_output_bytes: int, preload: Sequence[str]) -> None:
        self._memory_bytes = memory_mb << 20
        self._max_output_bytes = max_output_bytes
        self._preload = tuple(preload)
        self._zygote: _Zygote | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Raises RuntimeError, naming what is missing, where this machine can't run the sandbox."""
        self._zygote = await self._start_zygote()

    async def run(self, code: str, timeout_s: float) -> ProgramOutcome:
        """Runs one program. A zygote that died is replaced once; RuntimeError if that doesn't help."""
        zygote = self._zygote
        if zygote is None:
            raise RuntimeError("the python sandbox is not running; await start() first")
        try:
            return await zygote.run(code, timeout_s, self._max_output_bytes)
        except SandboxDiedError:
            zygote = await self._replace(zygote)
        return await zygote.run(code, timeout_s, self._max_output_bytes)

    async def close(self) -> None:
        """Ends every process of the sandbox; calls that are under way raise RuntimeError."""
        async with self._starting:
            zygote, self._zygote = self._zygote, None
            if zygote is not None:
                await zygote.close()

    async def _replace(self, dead: _Zygote) -> _Zygote:
        """The zygote in place of `dead`, started by the first call that asks."""
        async with self._starting:
            if self._zygote is dead:
                await dead.close()
                self._zygote = await self._start_zygote()
            if self._zygote is None:
                raise RuntimeError("the python sandbox was closed while a program ran")
            return self._zygote

    async def _start_zygote(self) -> _Zygote:
        settings = {
            "memory_bytes": self._memory_bytes,
            "preload": self._preload,
            "import_paths": [f"{PACKAGES_FOLDER}/{index}" for index in range(len(_import_paths()))],
        }
        zygote = _Zygote(settings)
        try:
            await zygote.wait_until_ready()
        except BaseException:
            await zygote.close()
            raise
        return zygote


class _Zygote:
    """One life of the zygote process and the calls that are with it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        command = bubblewrap_command()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process may write
        with theirs:
            self._process = subprocess.Popen(
                [*command, json.dumps({**settings, "control_fd": theirs.fileno()})],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=(theirs.fileno(),),
                env={},
                cwd="/",
            )
        self._control.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._reports: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ids = itertools.count()
        self._dead = False
        self._loop.add_reader(self._control, self._receive)

    async def wait_until_ready(self) -> None:
        try:
            message = await asyncio.wait_for(self._ready, START_TIMEOUT_S)
        except SandboxDiedError:
            raise RuntimeError(f"bubblewrap could not start ({self._said()}); {NAMESPACES_FIX}") from None
        except TimeoutError:
            raise RuntimeError(f"the zygote was not ready within {START_TIMEOUT_S:g} s") from None
        if "failed" in message:
            raise RuntimeError(f"the zygote could not start: {message['failed']}")

    async def run(self, code: str, timeout_s: float, max_output_bytes: int) -> ProgramOutcome:
        call_id = next(self._ids)
        report = self._loop.create_future()
        readers: list[OutputReader] = []
        theirs: list[int] = [file_of(code)]
        try:
            for keep in ("start", "end"):
                read_end, write_end = os.pipe()
                theirs.append(write_end)
                readers.append(OutputReader(read_end, max_output_bytes, keep, lambda: self._kill(call_id)))
            self._reports[call_id] = report
            await self._send({"id": call_id, "timeout_s": timeout_s}, theirs)
            while theirs:
                os.close(theirs.pop())
            answer = await asyncio.wait_for(report, timeout_s + REPORT_GRACE_S)
        except TimeoutError:
            raise SandboxDiedError(f"the zygote did not end a program {REPORT_GRACE_S:g} s past its deadline") from None
        finally:
            if call_id in self._reports:
                del self._reports[call_id]
                self._kill(call_id)
            for file in theirs:
                os.close(file)
            stdout, stderr = (reader.finish() for reader in readers) if len(readers) == 2 else ("", "")
        if "failed" in answer:
            raise RuntimeError(f"the sandbox could not start a program ({answer['failed']}); {NAMESPACES_FIX}")
        flooded = any(reader.flooded for reader in readers)
        return ProgramOutcome(
            stdout=stdout,
            stderr=stderr,
            exit_code=answer["exit_code"],
            ended="deadline" if answer["timed_out"] else "output" if flooded else "itself",
            stdout_cut=readers[0].cut,
        )

    async def close(self) -> None:
        """The zygote ends when its socket closes, and the kernel ends all it has started."""
        if not self._dead:
            self._die("the sandbox was closed")
        self._control.close()
        for _ in range(int(CLOSE_TIMEOUT_S / 0.01)):
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.01)
        else:
            self._process.kill()
            self._process.wait()
        self._stderr.close()

    async def _send(self, message: dict[str, Any], files: Sequence[int]) -> None:
        while not self._dead:
            try:
                socket.send_fds(self._control, [json.dumps(message).encode()], list(files))
                return
            except BlockingIOError:
                await asyncio.sleep(0.001)
            except OSError as error:
                self._die(str(error))
        raise SandboxDiedError("the zygote is dead")

    def _kill(self, call_id: int) -> None:
        """Asks for the end of a program; where the socket takes no more, its deadline ends it."""
        if not self._dead:
            try:
                self._control.send(json.dumps({"kill": call_id}).encode())
            except OSError:
                return

    def _receive(self) -> None:
        try:
            message = self._control.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._die("the zygote ended")
            return
        answer = json.loads(message)
        waiting = self._reports.pop(answer["id"], None) if "id" in answer else self._ready
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _die(self, why: str) -> None:
        self._dead = True
        self._loop.remove_reader(self._control)
        for waiting in (self._ready, *self._reports.values()):
            if not waiting.done():
                waiting.set_exception(SandboxDiedError(why))
                waiting.exception()
        self._reports.clear()

    def _said(self) -> str:
        """The last line of the dead process's error output."""
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "it is still running, but closed its socket"
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}, no message"


def bubblewrap_command() -> list[str]:
    """Everything but the zygote's settings. Raises RuntimeError where bubblewrap is not installed."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise RuntimeError("bubblewrap is not installed: `apt-get install bubblewrap`")
    here = Path(__file__).parent
    command = [bwrap, "--die-with-parent", "--new-session", "--clearenv"]
    command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox"]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    command += ["--dev", "/dev", "--tmpfs", "/tmp"]
    # Folders above a mount would otherwise be closed to all but their owner.
    above = {folder for interpreter in _interpreter_folders() for folder in interpreter.parents} | {
        Path("/etc"),
        Path(PACKAGES_FOLDER),
    }
    for folder in sorted(above - {Path("/")}):
        command += ["--perms", "0755", "--dir", str(folder)]
    for folder in ("/usr", "/etc/alternatives", "/etc/ld.so.cache", *_interpreter_folders()):
        command += ["--ro-bind-try", str(folder), str(folder)]
    for index, folder in enumerate(_import_paths()):
        command += ["--ro-bind", str(folder), f"{PACKAGES_FOLDER}/{index}"]
    for folder in map(Path, SYSTEM_FOLDERS):
        if folder.is_symlink():
            command += ["--symlink", os.readlink(folder), str(folder)]
        elif folder.is_dir():
            command += ["--ro-bind", str(folder), str(folder)]
    command += ["--ro-bind", str(here / "sandbox_zygote.py"), f"{SANDBOX_FOLDER}/__main__.py"]
    command += ["--ro-bind", str(here / "sandbox_program.py"), f"{SANDBOX_FOLDER}/sandbox_program.py"]
    if os.getuid() == 0:
        # Mounts with root's eyes, then the zygote itself becomes nobody: a home folder may be closed to everyone else.
        command += ["--dir", "/proc", "--cap-drop", "ALL"]
        command += ["--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--proc", "/proc", "--unshare-user"]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    return [*command, _interpreter(), "-I", "-B", "-X", "utf8", SANDBOX_FOLDER]


def _interpreter() -> str:
    return os.path.realpath(sys.executable)


def _interpreter_folders() -> list[Path]:
    """Where the base interpreter and its standard library live, outside /usr."""
    folders = dict.fromkeys(Path(prefix).resolve() for prefix in (sys.base_prefix, sys.base_exec_prefix))
    return [folder for folder in folders if not folder.is_relative_to("/usr")]


def _import_paths() -> list[Path]:
    """The folders of installed libraries that this process imports from; never a checkout."""
    paths = [Path(path) for path in sys.path]
    return [path for path in dict.fromkeys(paths) if path.name in {"site-packages", "dist-packages"} and path.is_dir()]


def file_of(code: str) -> int:
    """A memory file that holds the program, at its start."""
    file = os.memfd_create("program", os.MFD_CLOEXEC)
    view = memoryview(code.encode("utf-8", "replace"))
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file
