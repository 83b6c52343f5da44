"""What every tool must do, the real ones included, and what the Python sandbox must hold against.

Its programs attack the sandbox, each in a way that does no harm where a wall is missing.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_arpo.agent_tools.python import PythonTool
from megatron_arpo.agent_tools.search import SearchTool
from megatron_arpo.types import ToolResult

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed: apt-get install bubblewrap")
REPOSITORY = Path(__file__).parents[2]


def use(tool, body):
    """Runs `await body(tool)` between start and close."""

    async def run():
        await tool.start()
        try:
            return await body(tool)
        finally:
            await tool.close()

    return asyncio.run(run())


def python(**changes):
    return PythonTool(**({"max_concurrent": 8} | changes))


def run(code, timeout_s=20.0, **changes):
    return use(python(**changes), lambda tool: tool.call(code, timeout_s))


def descendants(pid):
    """Ids of the processes below `pid`."""
    children = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry))
    found, open_ids = set(), [pid]
    while open_ids:
        below = children.get(open_ids.pop(), [])
        found.update(below)
        open_ids += below
    return found


def kill_descendants():
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def make_search(tmp_path):
    path = tmp_path / "cache.json"
    path.write_text(json.dumps({"2 + 3": "Page 1: two plus three makes 5"}))
    return SearchTool(cache_path=path, top_k=2, max_result_chars=1000)


TOOLS = [
    pytest.param(lambda tmp_path: python(), "print(2 + 3)", id="python-bubblewrap", marks=needs_bwrap),
    pytest.param(lambda tmp_path: python(sandbox="none", max_concurrent=2), "print(2 + 3)", id="python-none"),
    pytest.param(make_search, "three plus", id="search"),
]


@pytest.mark.parametrize(("make", "arguments"), TOOLS)
def test_contract_of_every_tool(make, arguments, tmp_path):
    async def body(tool):
        assert isinstance(tool.name, str) and tool.name
        first = await tool.call(arguments, timeout_s=20)
        many = await asyncio.gather(*(tool.call(arguments, timeout_s=20) for _ in range(4)))
        odd = [await tool.call(text, timeout_s=20) for text in ("", "\x00", "ü€🙂 \ud800", "(" * 300)]
        await tool.close()
        return first, many, odd

    first, many, odd = use(make(tmp_path), body)
    assert first.status == "ok" and "5" in first.text and first.latency_s > 0 and first.num_tries == 1
    assert [result.text for result in many] == [first.text] * 4
    assert all(isinstance(result, ToolResult) and result.status in {"ok", "error"} for result in odd)


@pytest.mark.parametrize("sandbox", [pytest.param("bubblewrap", marks=needs_bwrap), "none"])
def test_python_answers_as_published(sandbox):
    async def body(tool):
        async def answer(code):
            result = await tool.call(code, timeout_s=20)
            return result.text, result.status

        assert await answer("print('hello')\n") == ("hello", "ok")
        assert await answer("x = 2\nx + 3") == ("5", "ok")
        assert await answer("print(1)\nprint(2)") == ("1\n2", "ok")
        assert await answer("[1].append(2)") == ("None", "ok")
        assert await answer("x = 1") == ("", "ok")
        assert await answer("import sys\nsys.exit()") == ("", "ok")
        assert await answer("exit('bye')") == ("bye", "error")
        assert (await answer("exit(3)"))[0] == "The program ended with exit code 3 and no message."
        assert await answer("import sys; sys.stdout.buffer.write(b'\\xff\\n'); x = 0") == ("\ufffd", "ok")
        assert await answer("class A: pass\nprint(A.__module__, __name__)") == ("__main__ __main__", "ok")
        where = 'Traceback (most recent call last):\n  File "<string>", line 3, in <module>\n'
        expected = where + "ZeroDivisionError: division by zero"
        assert await answer("# a comment\nprint('lost')\n1 / 0") == (expected, "error")
        text, status = await answer("for")
        assert status == "error" and text.endswith("SyntaxError: invalid syntax") and "Traceback" not in text
        assert (await answer("input()"))[0].endswith("EOFError: EOF when reading a line")
        late = await tool.call("print('early', flush=True)\nwhile True: pass", timeout_s=0.5)
        assert late.status == "timeout" and "0.5 seconds" in late.text and 0.5 <= late.latency_s < 5

    use(python(sandbox=sandbox), body)


@pytest.mark.parametrize("sandbox", [pytest.param("bubblewrap", marks=needs_bwrap), "none"])
def test_output_is_bounded(sandbox):
    async def body(tool):
        long = await tool.call("print('x' * 5000)", timeout_s=20)
        assert long.status == "ok" and long.text == "x" * 1000 + "\n[output cut]"
        endless = await tool.call("while True: print('spam')", timeout_s=20)
        assert endless.status == "error" and endless.text.startswith("spam") and endless.latency_s < 15
        assert "wrote too much" in endless.text and len(endless.text) < 1100
        noisy = await tool.call("import sys\nsys.stderr.write('e' * 5000)\n1 / 0", timeout_s=20)
        assert noisy.text.endswith("ZeroDivisionError: division by zero") and len(noisy.text) <= 1000

    use(python(sandbox=sandbox, max_output_bytes=1000), body)


def test_no_sandbox_is_said_aloud(caplog):
    with caplog.at_level(logging.WARNING):
        run("1", sandbox="none")
    assert "RUN UNPROTECTED" in caplog.text


def test_a_missing_bubblewrap_is_named_with_the_fix(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"apt-get install bubblewrap.*tools\.python\.sandbox: none"):
        run("1")


def test_a_bubblewrap_that_fails_is_quoted(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(RuntimeError, match=r"No permissions to create new namespace.*tools\.python\.sandbox: none"):
        run("1")


@needs_bwrap
class TestSandbox:
    def test_libraries_for_mathematics_can_be_imported(self):
        code = "import numpy, scipy.optimize, sympy\nint(numpy.arange(4).sum()), sympy.factorint(84)"
        assert run(code).text == "(6, {2: 2, 3: 1, 7: 1})"

    def test_preloaded_modules_are_there_and_randomness_is_fresh(self):
        async def body(tool):
            loaded = await tool.call("import sys\n'numpy.random' in sys.modules", 20)
            draws = [await tool.call("import numpy\nnumpy.random.rand()", 20) for _ in range(2)]
            return loaded.text, {draw.text for draw in draws}

        loaded, draws = use(python(preload=("numpy", "numpy.random")), body)
        assert loaded == "True" and len(draws) == 2

    def test_a_preload_that_fails_is_named(self):
        with pytest.raises(RuntimeError, match="No module named 'no_such_module'"):
            run("1", preload=("no_such_module",))

    def test_a_timeout_kills_the_children_too(self):
        code = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: os.setsid()\ntime.sleep(1000)"

        async def body(tool):
            before = descendants(os.getpid())
            result = await tool.call(code, 0.7)
            return result.status, descendants(os.getpid()) - before

        assert use(python(), body) == ("timeout", set())

    def test_children_do_not_outlive_their_program(self):
        async def body(tool):
            before = descendants(os.getpid())
            result = await tool.call("import os, time\nif os.fork() == 0: time.sleep(1000)", 20)
            return result.status, result.latency_s < 10, descendants(os.getpid()) - before

        assert use(python(), body) == ("ok", True, set())

    def test_a_fork_bomb_is_contained(self):
        bomb = """
import os, time
for _ in range(200):
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    except OSError:
        time.sleep(0.01)
time.sleep(60)
"""

        async def body(tool):
            before = descendants(os.getpid())
            bombing = asyncio.create_task(tool.call(bomb, 2.0))
            await asyncio.sleep(1.0)
            most = len(descendants(os.getpid()) - before)
            beside = await tool.call("1 + 1", 20)
            bombed = await bombing
            return most, beside.text, bombed.status, descendants(os.getpid()) - before

        most, beside, status, left = use(python(), body)
        assert 16 < most <= 66
        assert (beside, status, left) == ("2", "timeout", set())

    def test_much_memory_is_refused(self):
        result = run("x = bytearray(2 << 30)", memory_mb=512)
        assert result.status == "error" and result.text.endswith("MemoryError")

    def test_no_network(self):
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
            name = f"\0megatron-arpo-test-{os.getpid()}"
            abstract.bind(name)
            abstract.listen()
            code = f"""
import socket
for family, address in ((socket.AF_INET, {server.getsockname()}), (socket.AF_UNIX, {name!r})):
    try:
        socket.socket(family).connect(address)
        print("connected")
    except OSError:
        print("refused")
"""
            assert run(code).text == "refused\nrefused"
            assert run(code, sandbox="none").text == "connected\nconnected"

    def test_files_and_secrets_of_the_user_are_out_of_sight(self, monkeypatch, tmp_path):
        monkeypatch.setenv("SECRET_KEY", "hunter2")
        secret = tmp_path / "secret"
        secret.write_text("hunter2")
        checkout = REPOSITORY / "setup.py"
        assert checkout.is_file()
        paths = [str(secret), str(checkout), "/etc/passwd", "/etc/shadow", "/proc/1/root/etc/passwd"]
        code = f"""
import os
print([path for path in {paths} if os.path.exists(path)])
for folder in ({str(Path.home())!r}, "/root", "/home"):
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        # Folders above the interpreter are there, with nothing else in them.
        if not {sys.base_prefix!r}.startswith(os.path.join(folder, name)):
            print(folder, name)
print("SECRET_KEY" in os.environ, "hunter2" in open("/proc/self/environ").read())
"""
        assert run(code).text == "[]\nFalse False"

    def test_nothing_outside_the_scratch_folders_can_be_written(self):
        code = """
import os
def can_write(folder):
    try:
        open(os.path.join(folder, "probe"), "w").close()
        return True
    except OSError:
        return False
folders = "/ /usr /usr/local /etc /sandbox /dev /var /proc /sandbox-packages/0".split() + [os.path.dirname(os.__file__)]
print([folder for folder in folders if can_write(folder)], can_write("/tmp"), os.getcwd())
"""
        assert run(code).text == "[] True /tmp"

    def test_calls_do_not_see_each_other(self):
        leave = """
import os, builtins
builtins.left = 1
for folder in ("/tmp", "/dev/shm"):
    open(folder + "/left", "w").write("x")
os.getpid()
"""
        look = "import os, builtins\nos.listdir('/tmp'), os.listdir('/dev/shm'), hasattr(builtins, 'left')"
        peek = """
import os, time
time.sleep(0.5)
[name for name in os.listdir("/proc") if name.isdigit()], len(os.listdir("/proc/self/fd"))
"""

        async def body(tool):
            left = await tool.call(leave, 20)
            looked = await tool.call(look, 20)
            peeked = await asyncio.gather(*(tool.call(peek, 20) for _ in range(4)))
            return left.text, looked.text, {result.text for result in peeked}

        # One process, and stdin, stdout, stderr and the listing itself.
        assert use(python(), body) == ("1", "([], [], False)", {"(['1'], 4)"})

    def test_a_program_is_nobody_and_can_become_nothing_else(self):
        code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(os.getuid() != 0, {status[name] for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")}, status["NoNewPrivs"])
print([libc.unshare(flag) for flag in (0x10000000, 0x00020000)], libc.umount2(b"/proc", 2))
try:
    os.setuid(0)
except OSError as error:
    print(type(error).__name__)
"""
        zero = "{'0000000000000000'}"
        assert run(code).text == f"True {zero} 1\n[-1, -1] -1\nOSError"

    def test_killing_everything_kills_only_itself(self):
        async def body(tool):
            before = descendants(os.getpid())
            await tool.call("import os\nos.kill(0, 9)\nos.kill(-1, 9)\nos.killpg(0, 15)", 20)
            after = await tool.call("1 + 1", 20)
            return after.text, descendants(os.getpid()) == before

        assert use(python(), body) == ("2", True)

    def test_no_call_of_many_is_lost(self):
        async def body(tool):
            return await asyncio.gather(*(tool.call(f"import time\ntime.sleep(0.05)\n{index} * 2", 60) for index in range(64)))

        results = use(python(max_concurrent=64), body)
        assert [(result.text, result.status) for result in results] == [(str(index * 2), "ok") for index in range(64)]

    def test_waiting_for_a_slot_counts_towards_the_deadline(self):
        async def body(tool):
            long = asyncio.create_task(tool.call("import time\ntime.sleep(2)", 20))
            await asyncio.sleep(0.2)
            started = time.monotonic()
            short = await tool.call("1", 0.3)
            return short.status, time.monotonic() - started < 1.5, (await long).status

        assert use(python(max_concurrent=1), body) == ("timeout", True, "ok")

    def test_a_cancelled_call_is_killed(self):
        async def body(tool):
            before = descendants(os.getpid())
            call = asyncio.create_task(tool.call("while True: pass", 60))
            await asyncio.sleep(0.5)
            during = descendants(os.getpid()) - before
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await asyncio.sleep(0.3)
            return len(during), descendants(os.getpid()) - before, (await tool.call("1 + 1", 20)).text

        assert use(python(), body) == (1, set(), "2")

    def test_a_dead_zygote_is_replaced_and_its_calls_are_run_again(self):
        async def body(tool):
            call = asyncio.create_task(tool.call("import time\ntime.sleep(0.8)\n1 + 1", 20))
            await asyncio.sleep(0.3)
            kill_descendants()
            return (await call).text, (await tool.call("2 + 2", 20)).text

        assert use(python(), body) == ("2", "4")

    def test_a_zygote_that_cannot_be_replaced_raises(self, monkeypatch, tmp_path):
        async def body(tool):
            monkeypatch.setenv("PATH", str(tmp_path))
            kill_descendants()
            await asyncio.sleep(0.2)
            with pytest.raises(RuntimeError, match="bubblewrap is not installed"):
                await tool.call("1", 20)

        use(python(), body)

    def test_close_leaves_no_process_and_no_file(self):
        async def body():
            before = descendants(os.getpid())
            files = len(os.listdir("/proc/self/fd"))
            tool = python()
            await tool.start()
            running = asyncio.create_task(tool.call("import os, time\nos.fork()\ntime.sleep(1000)", 60))
            await asyncio.sleep(0.3)
            assert len(descendants(os.getpid()) - before) >= 4
            await tool.close()
            left = descendants(os.getpid()) - before
            ended = await asyncio.gather(running, return_exceptions=True)
            return left, isinstance(ended[0], RuntimeError), len(os.listdir("/proc/self/fd")) - files

        assert asyncio.run(body()) == (set(), True, 0)

    def test_it_dies_with_the_process_that_started_it(self):
        script = """
import asyncio
from megatron_arpo.agent_tools.python import PythonTool

async def main():
    tool = PythonTool(max_concurrent=1)
    await tool.start()
    print("up", flush=True)
    await tool.call("while True: pass", 60)

asyncio.run(main())
"""
        process = subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"up\n"
        time.sleep(0.5)
        below = descendants(process.pid)
        assert len(below) >= 3
        process.kill()
        process.wait()
        process.stdout.close()
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in below) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user; the other tests run unprivileged already")
    def test_it_works_for_an_unprivileged_user(self):
        script = """
import asyncio
from megatron_arpo.agent_tools.python import PythonTool

async def main():
    tool = PythonTool(max_concurrent=1)
    await tool.start()
    print((await tool.call("import os; 2 + 3, os.getuid(), os.getpid()", 20)).text)
    await tool.close()

asyncio.run(main())
"""
        for interpreter in (sys.executable, "/usr/bin/python3"):
            as_nobody = {
                "user": 65534,
                "group": 65534,
                "extra_groups": (),
                "cwd": "/",
                "capture_output": True,
                "text": True,
            }
            environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
            can_import = "import sys, megatron_arpo.types; assert sys.version_info >= (3, 11)"
            try:
                if subprocess.run([interpreter, "-c", can_import], env=environment, **as_nobody).returncode != 0:
                    continue
            except OSError:
                continue
            found = subprocess.run([interpreter, "-c", script], env=environment, timeout=60, **as_nobody)
            assert (found.stdout, found.stderr) == ("(5, 65534, 1)\n", "")
            return
        pytest.skip("no Python 3.11 and checkout that uid 65534 can read")

    def test_overhead_of_a_call(self):
        async def body(tool):
            latencies = []
            for _ in range(40):
                started = time.perf_counter()
                assert (await tool.call("1 + 1", 20)).text == "2"
                latencies.append(time.perf_counter() - started)
            return statistics.median(latencies)

        median_s = use(python(), body)
        print(f"sandbox overhead per call: {median_s * 1e3:.1f} ms at the median")
        assert median_s < 0.2
