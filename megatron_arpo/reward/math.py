"""The `math` reward: the published turn format, then equality by math-verify in a process that can be killed.

math-verify stops long computations with SIGALRM, which only the main thread of a process may use, while rewards run in
threads. So equality is decided by `math_worker.py` in a process of its own, with a deadline for each answer.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_arpo.reward.base import gold_answers
from megatron_arpo.reward.format import read_answer
from megatron_arpo.types import LeafReward

DEADLINE_S = 5.0
START_DEADLINE_S = 60.0
MAX_SHOWN_CHARACTERS = 200
"""Of an answer, in the reason."""

_PACKAGE_ROOT = Path(__file__).parents[2]


def math(solution: str, answers: Sequence[str]) -> LeafReward:
    r"""1 if the boxed answer equals a gold one, 0 if not, -1 for a bad format (the one of `deep_research`).

    An answer that takes longer than 5 s to compare, or breaks the worker twice, scores 0 and the reason says so. Can be
    called from any thread. Raises ValueError where a gold is not text, RuntimeError where the worker can't start.

    Example: math("<think>a</think><answer>\\boxed{\\frac12}</answer>", ["0.5"]) has score 1.0 and parts
    {"format": 1.0, "correct": 1.0}.
    """
    golds = gold_answers(answers)
    answer, reason = read_answer(solution)
    if answer is None:
        return LeafReward(score=-1.0, reason=reason, parts={"format": 0.0, "correct": 0.0})
    correct, reason = _verifier.verify(answer, golds)
    return LeafReward(score=float(correct), reason=reason, parts={"format": 1.0, "correct": float(correct)})


class MathVerifier:
    """One worker process behind a lock: started at the first answer, killed at a deadline, started anew for the next.

    The worker ends with this process, however that ends: it reads the end of its input, and notices a new parent.
    """

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.deadline_s = deadline_s
        self._lock = threading.Lock()
        self._owner_pid = os.getpid()
        self._worker: subprocess.Popen[bytes] | None = None

    def verify(self, answer: str, golds: Sequence[str]) -> tuple[bool, str]:
        """Whether `answer` equals one of `golds`, and a sentence saying so, or why it could not be decided."""
        if self._owner_pid != os.getpid():  # forked: worker and lock belong to the parent
            self.__init__(self.deadline_s)
        request = json.dumps({"answer": answer, "golds": list(golds)}).encode() + b"\n"
        with self._lock:
            for _ in range(2):  # a worker may have been killed from outside before it saw this answer
                try:
                    reply = self._ask(request)
                except TimeoutError:
                    return False, "verification timed out"
                except (EOFError, BrokenPipeError):
                    continue
                if "error" in reply:
                    return False, f"verification failed: {reply['error']}"
                verdict = "correct" if reply["correct"] else "wrong"
                return reply["correct"], f"{verdict} answer: {answer[:MAX_SHOWN_CHARACTERS]}"
        return False, "verification failed: the worker process died of it twice"

    def close(self) -> None:
        """Ends the worker, if there is one. The next answer starts another."""
        worker, self._worker = self._worker, None
        if worker is None or self._owner_pid != os.getpid():
            return
        worker.kill()
        worker.wait()
        for pipe in (worker.stdin, worker.stdout):
            with contextlib.suppress(BrokenPipeError):  # a request that it never read
                pipe.close()

    def _ask(self, request: bytes) -> dict:
        try:
            if self._worker is None:
                self._start()
            self._worker.stdin.write(request)
            self._worker.stdin.flush()
            return _read_reply(self._worker, self.deadline_s)
        except BaseException:  # an interrupt too: its reply would be taken for that of the next answer
            self.close()
            raise

    def _start(self) -> None:
        environment = dict(os.environ)
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(_PACKAGE_ROOT), *([inherited] if inherited else [])])
        self._worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "megatron_arpo.reward.math_worker", str(os.getpid()), str(self.deadline_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        atexit.unregister(self.close)
        atexit.register(self.close)
        try:
            greeting = _read_reply(self._worker, START_DEADLINE_S)
        except (EOFError, TimeoutError) as error:
            raise RuntimeError(
                f"the math reward's worker did not start within {START_DEADLINE_S:g} s; run "
                "`python -m megatron_arpo.reward.math_worker` to see why"
            ) from error
        if "error" in greeting:
            raise RuntimeError(f"the math reward's worker cannot start: {greeting['error']}; pip install 'math-verify[antlr4_13_2]==0.9.0'")


def _read_reply(worker: subprocess.Popen[bytes], timeout_s: float) -> dict:
    """One line of JSON. Raises TimeoutError where it is late and EOFError where the worker is gone."""
    descriptor = worker.stdout.fileno()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError(f"no reply within {timeout_s:g} s")
        received = os.read(descriptor, 65536)
        if not received:
            raise EOFError("the math worker ended")
        line += received
    return json.loads(line)


_verifier = MathVerifier()
