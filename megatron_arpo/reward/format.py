"""The turn format of the published ARPO rewards, and the boxed answer of a solution that keeps to it.

Faults are worded as in the published code, so that scores and reasons can be compared row by row. Comparing the answer
with the gold ones is left to the rewards.
"""

from __future__ import annotations

import re

TOOLS = ("search", "python")
"""Tools whose calls are checked, in the order in which their faults are reported."""

_BOXED = "\\boxed{"
_BOXED_WITH_SPACE = "\\boxed "
_UNBALANCED_BOX = "argument of type 'NoneType' is not iterable"
"""What the published code says, by accident, of a box whose braces do not close."""


def format_fault(text: str) -> str | None:
    r"""What is wrong with the format of a solution; None if nothing is.

    Asked for: think tags in equal numbers and at least one pair; one answer; every call closed and then followed by a
    result; an answer with a box. Tags are only counted and found, not parsed: a result may belong to two calls, and
    what stands between the parts is free.

    Example: format_fault("<think>a</think><answer>5</answer>") == "answer is missing \\boxed{} format"
    """
    if text.count("<think>") != text.count("</think>"):
        return "<think> </think> not paired"
    if "<think>" not in text:
        return "<think> or </think> not found"
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return "<answer> or </answer> not found"
    for tool in TOOLS:
        if fault := _call_fault(text, tool):
            return f"{tool}/result tags are {fault}"
    start, end = text.find("<answer>"), text.find("</answer>")
    if start > end:
        return "<answer> must be before </answer>"
    if _BOXED not in text[start:end] or "}" not in text[start:end]:
        return "answer is missing \\boxed{} format"
    return None


def _call_fault(text: str, tool: str) -> str | None:
    """Follows the calls of one tool: from each call the search goes on behind the result it was given."""
    call = text.find(f"<{tool}>")
    while call != -1:
        call_end = text.find(f"</{tool}>", call)
        result = text.find("<result>", call)
        result_end = -1 if result == -1 else text.find("</result>", result)
        if -1 in (call_end, result, result_end):
            return "incomplete"
        if call_end > result:
            return "nested in the wrong order"
        call = text.find(f"<{tool}>", result_end)
    return None


def read_answer(solution: str) -> tuple[str | None, str]:
    r"""(the boxed answer, "") of a well-formed solution, else (None, the reason why it has none).

    Example: read_answer("<think>a</think><answer>so \\boxed{5}</answer>") == ("5", "")
    """
    if fault := format_fault(solution):
        return None, f"bad format: {fault}"
    answer, fault = last_boxed(answer_text(solution) or "")
    return (None, f"find box error: {fault}") if answer is None else (answer, "")


def answer_text(solution: str) -> str | None:
    """What stands between the first answer tags; None if there are none."""
    match = re.search(r"<answer>(.*?)</answer>", solution, re.DOTALL)
    return match.group(1) if match else None


def last_boxed(text: str) -> tuple[str | None, str]:
    r"""(content of the last box in `text`, ""), or (None, fault).

    A box written "\boxed x" goes before one with braces, wherever it stands, and reaches to the next "$" or the end.
    """
    if _BOXED_WITH_SPACE in text:
        return text.rpartition(_BOXED_WITH_SPACE)[2].partition("$")[0], ""
    start = text.rfind(_BOXED.rstrip("{"))
    if start == -1:
        return None, _UNBALANCED_BOX
    num_open = 0
    for brace in re.compile("[{}]").finditer(text, start):
        num_open += 1 if brace.group() == "{" else -1
        if num_open == 0 and brace.group() == "}":
            box = text[start : brace.end()]
            return (box[len(_BOXED) : -1], "") if box.startswith(_BOXED) else (None, "")
    return None, _UNBALANCED_BOX
