import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_arpo.reward import math as math_reward
from megatron_arpo.reward.math import MathVerifier, math

NEVER_ENDING = "9^{9^{9^{9}}}"


def solution(answer: str) -> str:
    return f"<think>t</think><answer>\\boxed{{{answer}}}</answer>"


@pytest.fixture
def verifier():
    verifier = MathVerifier(deadline_s=1.0)
    yield verifier
    verifier.close()


@pytest.mark.parametrize(
    ("answer", "golds", "score"),
    [
        ("\\frac12", ["0.5"], 1),
        ("-6+3\\sqrt3", ["3\\sqrt{3} - 6"], 1),
        ("q-p", ["1", "-(p - q)"], 1),
        ("p-q", ["q - p"], 0),
        ("$\\frac{1}{2}$.", "$\\frac{1}{2}$", 1),
        ("\\{3,2,1\\}", ["{1,2,3}"], 1),
        ("6", ["5"], 0),
        ("", ["5"], 0),
        ("", [""], 0),
        ("\\text{rome}", ["Rome"], 1),
        ("more", ["Rome"], 0),  # e m o r as a product of letters
        ("5", [], 0),
    ],
)
def test_equality(answer, golds, score):
    reward = math(solution(answer), golds)
    assert (reward.score, reward.parts) == (score, {"format": 1.0, "correct": score})


def test_a_bad_format_starts_no_worker(monkeypatch):
    verifier = MathVerifier()
    monkeypatch.setattr(math_reward, "_verifier", verifier)
    reward = math("\\boxed{5}", ["5"])
    assert (reward.score, reward.parts) == (-1.0, {"format": 0.0, "correct": 0.0})
    assert reward.reason == "bad format: <think> or </think> not found"
    with pytest.raises(ValueError, match="answers"):
        math(solution("5"), [5])
    assert verifier._worker is None


def test_a_deadline_kills_the_worker_and_the_next_answer_gets_another(verifier):
    assert verifier.verify("1/2", ["0.5"])[0]
    worker = verifier._worker
    started = time.monotonic()
    assert verifier.verify(NEVER_ENDING, ["5"]) == (False, "verification timed out")
    assert time.monotonic() - started < 5.0
    assert worker.returncode == -signal.SIGKILL
    assert verifier.verify("5", ["5"])[0]


def test_a_worker_killed_from_outside_is_replaced(verifier):
    assert verifier.verify("5", ["5"])[0]
    os.kill(verifier._worker.pid, signal.SIGKILL)
    assert verifier.verify("5", ["5"])[0]


def test_an_answer_that_breaks_the_worker_says_so(verifier, monkeypatch):
    def break_after_the_greeting(worker, timeout_s):
        if timeout_s == verifier.deadline_s:
            worker.kill()
            worker.wait()
            raise EOFError
        return read_reply(worker, timeout_s)

    read_reply = math_reward._read_reply
    monkeypatch.setattr(math_reward, "_read_reply", break_after_the_greeting)
    correct, reason = verifier.verify("5", ["5"])
    assert not correct
    assert "died" in reason
    assert verifier._worker is None


def test_threads_get_their_own_answers():
    with ThreadPoolExecutor(8) as threads:
        scores = list(threads.map(lambda n: math(solution(str(n)), [str(n - n % 2)]).score, range(40)))
    assert scores == [1.0, 0.0] * 20


def test_a_forked_child_gets_its_own_worker(verifier):
    assert verifier.verify("5", ["5"])[0]
    parents = verifier._worker.pid
    child = os.fork()
    if child == 0:
        right = verifier.verify("5", ["5"])[0] and verifier._worker.pid != parents
        verifier.close()
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert verifier._worker.pid == parents
    assert verifier.verify("5", ["5"])[0]


PARENT = """
import sys, threading, time
from megatron_arpo.reward.math import MathVerifier
verifier = MathVerifier(deadline_s=1.0)
verifier.verify("5", ["5"])
print(verifier._worker.pid, flush=True)
if sys.argv[1] == "busy":
    verifier.deadline_s = 60.0
    verifier.verify("9^{9^{9^{9}}}", ["5"])
elif sys.argv[1] == "idle":
    time.sleep(60)
"""


@pytest.mark.parametrize("ending", ["exit", "idle", "busy"])
def test_no_worker_outlives_its_parent(ending):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, ending], stdout=subprocess.PIPE, text=True)
    worker_pid = int(parent.stdout.readline())
    if ending != "exit":
        time.sleep(0.3)
        assert is_running(worker_pid)
        parent.kill()
    parent.wait(timeout=30)
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while is_running(worker_pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(worker_pid)


def is_running(pid: int) -> bool:
    """A zombie does not count: reaping orphans is the work of the machine's process 1."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
