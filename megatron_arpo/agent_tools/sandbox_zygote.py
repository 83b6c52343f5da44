"""The warm process inside the bubblewrap sandbox: forks one walled-off child for each program the host sends.

Standard library only; bound as `__main__.py` of a folder that also holds sandbox_program.py, run as `python -I FOLDER
SETTINGS`. Requests and reports are JSON messages on a SEQPACKET socket, one datagram each:
    {"id": 7, "timeout_s": 3.0} and three open files: program, stdout, stderr   run it
    {"kill": 7}                                                                 end it
    {"id": 7, "exit_code": 0, "timed_out": false}                               how it ended
    {"id": 7, "failed": "unshare: ..."}                                         no child could be walled off
Programs and their output never pass through this process, so no child inherits anything of another call.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import math
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

import sandbox_program

NOBODY = 65534
MESSAGE_BYTES = 65536
NUM_CALL_FILES = 3
SCRATCH_BYTES = 64 << 20

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 4, 24, 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
LINUX_CAPABILITY_VERSION_3 = 0x20080522
NEW_NAMESPACES = 0x10000000 | 0x20000000 | 0x00020000 | 0x08000000 | 0x04000000 | 0x40000000
"""CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET"""

libc = ctypes.CDLL(None, use_errno=True)
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4


@dataclass(slots=True)
class RunningProgram:
    """A child that is pid 1 of its own pid namespace: killing it kills all it has started."""

    call_id: int
    pid: int
    pidfd: int
    deadline: float
    timed_out: bool = False


def main() -> None:
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=settings["control_fd"])
    try:
        _become_unprivileged()
        sys.path = [path for path in sys.path[1:] if not path.endswith("-packages")] + settings["import_paths"]
        for module in settings["preload"]:
            importlib.import_module(module)
        _check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)")
    except Exception as error:
        control.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        sys.exit(1)
    gc.freeze()
    control.send(json.dumps({"ready": True}).encode())
    serve(control, settings["memory_bytes"])


def serve(control: socket.socket, memory_bytes: int) -> None:
    """Starts, watches and ends programs until the host closes the socket."""
    running: dict[int, RunningProgram] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(_seconds_to_deadline(running)):
                if key.data is not None:
                    selector.unregister(key.fileobj)
                    _report_end(control, running.pop(key.data))
                    continue
                message, files, _, _ = socket.recv_fds(control, MESSAGE_BYTES, NUM_CALL_FILES)
                if not message:
                    return
                request = json.loads(message)
                if "kill" in request:
                    if request["kill"] in running:
                        os.kill(running[request["kill"]].pid, signal.SIGKILL)
                    continue
                started = _start(request, files, memory_bytes)
                if isinstance(started, str):
                    control.send(json.dumps({"id": request["id"], "failed": started}).encode())
                else:
                    running[started.call_id] = started
                    selector.register(started.pidfd, selectors.EVENT_READ, started.call_id)
            _kill_overdue(running)


def _seconds_to_deadline(running: dict[int, RunningProgram]) -> float | None:
    deadlines = [program.deadline for program in running.values() if not program.timed_out]
    return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None


def _kill_overdue(running: dict[int, RunningProgram]) -> None:
    now = time.monotonic()
    for program in running.values():
        if not program.timed_out and now >= program.deadline:
            program.timed_out = True
            os.kill(program.pid, signal.SIGKILL)


def _report_end(control: socket.socket, program: RunningProgram) -> None:
    _, status = os.waitpid(program.pid, 0)
    os.close(program.pidfd)
    report = {
        "id": program.call_id,
        "exit_code": os.waitstatus_to_exitcode(status),
        "timed_out": program.timed_out,
    }
    control.send(json.dumps(report).encode())


def _start(request: dict[str, Any], files: list[int], memory_bytes: int) -> RunningProgram | str:
    """Forks a launcher that makes new namespaces, forks pid 1 into them and exits, which leaves pid 1 to this process.

    Returns once pid 1 is walled off, or says what failed.
    """
    deadline = time.monotonic() + request["timeout_s"]
    report_read, report_write = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        _launch(files, report_write, memory_bytes, cpu_s=math.ceil(request["timeout_s"]) + 1)
    os.close(report_write)
    for file in files:
        os.close(file)
    report = b""
    while chunk := os.read(report_read, 4096):
        report += chunk
    os.close(report_read)
    os.waitpid(launcher, 0)
    said = dict(line.split(" ", 1) for line in report.decode().splitlines())
    if "failed" in said or "pid" not in said:
        if "pid" in said:
            os.kill(int(said["pid"]), signal.SIGKILL)
            os.waitpid(int(said["pid"]), 0)
        return said.get("failed", "the launcher died")
    pid = int(said["pid"])
    return RunningProgram(call_id=request["id"], pid=pid, pidfd=os.pidfd_open(pid), deadline=deadline)


def _launch(files: list[int], report: int, memory_bytes: int, cpu_s: int) -> NoReturn:
    """In the launcher: never returns. Reports a line "pid N" and, if anything fails in it or pid 1, "failed WHY"."""
    try:
        uid, gid = os.getuid(), os.getgid()
        _check(libc.unshare(NEW_NAMESPACES), "unshare")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
        pid = os.fork()
        if pid:
            os.write(report, f"pid {pid}\n".encode())
            os._exit(0)
        report, code = _arrange_files(files, report)
        _wall_off(memory_bytes, cpu_s)
    except Exception as error:
        os.write(report, f"failed {error}\n".encode())
        os._exit(1)
    os.close(report)
    sandbox_program.run_program(code)


def _arrange_files(files: list[int], report: int) -> tuple[int, int]:
    """Leaves the child stdin (empty), stdout, stderr, the report pipe and the program, and no other call's."""
    program, stdout, stderr = files
    wanted = (os.open("/dev/null", os.O_RDONLY), stdout, stderr, report, program)
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, len(wanted)) for file in wanted]
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
    os.closerange(len(wanted), os.sysconf("SC_OPEN_MAX"))
    return 3, 4


def _wall_off(memory_bytes: int, cpu_s: int) -> None:
    """In pid 1 of the new namespaces: its own session, scratch folders, /proc and limits, and no capability left."""
    os.setsid()
    _mount("tmpfs", "/tmp", MS_NOSUID | MS_NODEV, f"size={SCRATCH_BYTES},mode=700")
    _mount("tmpfs", "/dev/shm", MS_NOSUID | MS_NODEV | MS_NOEXEC, f"size={SCRATCH_BYTES},mode=700")
    _mount("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    _write("/proc/sys/user/max_user_namespaces", "0")
    _write("/proc/self/oom_score_adj", "1000")
    os.chdir("/tmp")
    sandbox_program.limit_resources(memory_bytes, cpu_s, limit_processes=True)
    _drop_capabilities()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _drop_capabilities() -> None:
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    _check(libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "prctl(PR_CAP_AMBIENT)")
    capability = 0
    while libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    header = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0)
    _check(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def _become_unprivileged() -> None:
    """As root: a fresh /proc, which bubblewrap would half cover so that children could not mount their own, and then a
    real unprivileged user, because the kernel exempts uid 0 from process limits even inside a user namespace."""
    if os.getuid() != 0:
        return
    _mount("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    _check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


def _mount(kind: str, target: str, flags: int, options: str | None) -> None:
    encoded = options.encode() if options else None
    _check(libc.mount(kind.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), encoded), f"mount {target}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _check(result: int, action: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{action}: {os.strerror(code)}")


if __name__ == "__main__":
    main()
