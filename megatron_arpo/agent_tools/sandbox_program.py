"""Runs one model program inside this very process, the way `python -c` would, and ends the process.

Standard library only and no imports from the package: the sandbox loads this file without the package being visible.
As a script it is the unsandboxed runner: `python -I sandbox_program.py CODE_FD MEMORY_BYTES CPU_S`.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import os
import resource
import sys
import threading
import traceback
import types
from typing import NoReturn

PROGRAM_NAME = "<string>"
MAX_FILE_BYTES = 64 << 20
MAX_OPEN_FILES = 256
MAX_PROCESSES = 64


def limit_resources(memory_bytes: int, cpu_s: int, *, limit_processes: bool) -> None:
    """Hard limits of one process: address space, CPU seconds, file size, open files, no core dump; on request also
    processes, which the kernel counts per user and user namespace and never for uid 0."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if limit_processes:
        limits[resource.RLIMIT_NPROC] = MAX_PROCESSES
    for kind, wanted in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (value, value))


def run_program(code_fd: int) -> NoReturn:
    """Executes the UTF-8 program in open file `code_fd`, then exits: 0, 1 after an exception, or its own exit code."""
    with os.fdopen(code_fd, "rb") as file:
        source = file.read().decode("utf-8", "replace")
    sys.argv = ["-c"]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    exit_code = 0
    try:
        exec(compile_program(source), main.__dict__)
    except SystemExit as exit_request:
        exit_code = _report_exit(exit_request)
    except BaseException as error:
        exit_code = 1
        _report_error(error)
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(exit_code)


def compile_program(source: str) -> types.CodeType:
    """Code of `source`, with its line numbers; an expression at its end that is not a call of print is printed."""
    tree = ast.parse(source, PROGRAM_NAME)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr) and not _is_print(last.value):
        printing = ast.Call(func=ast.Name(id="print", ctx=ast.Load()), args=[last.value], keywords=[])
        tree.body[-1] = ast.copy_location(ast.Expr(value=printing), last)
        ast.fix_missing_locations(tree)
    return compile(tree, PROGRAM_NAME, "exec")


def _is_print(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


def _report_exit(request: SystemExit) -> int:
    """Exit code that `request` asks for, as the interpreter reads it: None is 0, what is no int is a message and 1."""
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    print(request.code, file=sys.stderr)
    return 1


def _report_error(error: BaseException) -> None:
    """Traceback without this file's own frames, as `python -c` shows it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    if isinstance(error, SyntaxError) and error.filename == PROGRAM_NAME:
        frame = None
    try:
        traceback.print_exception(type(error), error, frame)
    except (MemoryError, RecursionError):
        os.write(2, f"{type(error).__name__}\n".encode())


if __name__ == "__main__":
    limit_resources(int(sys.argv[2]), int(sys.argv[3]), limit_processes=False)
    run_program(int(sys.argv[1]))
