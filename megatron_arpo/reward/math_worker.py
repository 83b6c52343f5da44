"""The process behind the `math` reward: for each JSON line {"answer", "golds"} it writes {"correct"} or {"error"}.

`python -m megatron_arpo.reward.math_worker [PARENT_PID [DEADLINE_S]]` first writes {"ready": true} or {"error"}. It
ends with its input, when PARENT_PID is no longer its parent, and when one answer takes twice DEADLINE_S.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import select
import signal
import sys
from collections.abc import Sequence

MAX_MEMORY_BYTES = 4 * 1024**3
"""Towers of powers would otherwise take the machine's memory well before the deadline."""

PARENT_CHECK_S = 2.0

_WORDS = re.compile(r"(?=.*[a-z]{4})[a-z .,'-]+", re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf)\s*\{([^{}]*)\}")


def is_equal(answer: str, gold: str) -> bool:
    r"""Whether two answers are the same number, expression, tuple, set, equation, ... or the same words.

    Both are parsed as the content of a box. A gold of words is compared as words: parsed as mathematics it is a product
    of letters, which an anagram equals.

    Example: is_equal("\\frac{2}{4}", "0.5") and is_equal("rome", "Rome") and not is_equal("more", "Rome")
    """
    from math_verify import parse, verify

    answer, gold = _bare(answer), _bare(gold)
    if " ".join(answer.lower().split()) == " ".join(gold.lower().split()):
        return bool(gold)
    if _WORDS.fullmatch(gold):
        return False
    parsed_gold, parsed_answer = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer))
    return verify(parsed_gold, parsed_answer, timeout_seconds=None)


def _bare(text: str) -> str:
    r"""Without a final full stop, dollar signs around it, or \text{} around it: "$\frac12$." -> "\frac12"."""
    text = text.strip().removesuffix(".").strip("$ \t\n")
    wrapped = _TEXT.fullmatch(text)
    return wrapped.group(1).strip() if wrapped else text


def reply_to(answer: str, golds: Sequence[str]) -> dict:
    try:
        return {"correct": any(is_equal(answer, gold) for gold in golds)}
    except Exception as error:  # whatever sympy makes of a model's answer belongs to that answer
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def serve(parent_pid: int, deadline_s: float) -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not land among the replies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    logging.disable(logging.CRITICAL)  # math-verify warns that its own timeouts are off
    try:
        is_equal("\\frac{1}{2}", "0.5")
        _send(replies, {"ready": True})
    except ImportError as error:
        _send(replies, {"error": str(error)})
        return
    while os.getppid() == parent_pid:
        if not select.select([sys.stdin], [], [], PARENT_CHECK_S)[0]:
            continue
        line = sys.stdin.readline()
        if not line:
            return
        signal.setitimer(signal.ITIMER_REAL, 2 * deadline_s)  # fatal; for an answer whose parent died meanwhile
        reply = reply_to(**json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(replies, reply)


def _send(replies, reply: dict) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    serve(int(arguments[0]) if arguments else os.getppid(), float(arguments[1]) if len(arguments) > 1 else 5.0)
