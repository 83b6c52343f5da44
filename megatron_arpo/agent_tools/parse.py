"""Between the model's text and the tools: a segment's text -> ToolCall, a tool's answer -> what the model reads."""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron_arpo.types import ToolCall

CUT_MARKER = "\n[... cut]"


def parse_tool_call(text: str, tool_names: Iterable[str]) -> ToolCall | None:
    """The call that `text`, a model segment stopped behind `</name>`, ends in; None where there is none to make.

    The closing tag must stand at the end. The token that completed it may carry a few characters more (one run without
    a blank) and white space may follow. The arguments run from the last opening tag before it, stripped. A missing
    opening tag or empty arguments give None: the trajectory ends there, as in the published ARPO code.

    Example: parse_tool_call("<think>add</think><python>print(2 + 3)</python>", ["python"]) is
    ToolCall(name="python", arguments="print(2 + 3)").
    """
    ends = {name: text.rfind(f"</{name}>") for name in tool_names}
    if not ends:
        return None
    name = max(ends, key=lambda candidate: ends[candidate])
    end = ends[name]
    if end < 0 or not re.fullmatch(r"\S*\s*", text[end + len(f"</{name}>") :]):
        return None
    start = text.rfind(f"<{name}>", 0, end)
    if start < 0:
        return None
    arguments = text[start + len(f"<{name}>") : end].strip()
    return ToolCall(name=name, arguments=arguments) if arguments else None


def format_result(text: str) -> str:
    """What the model reads behind its call, in the published form.

    Example: format_result("5") == " <result>\\n5\\n</result>".
    """
    return f" <result>\n{text}\n</result>"


def cut_text(text: str, max_chars: int) -> str:
    """`text` in at most `max_chars` characters; where it is cut, it ends in CUT_MARKER for the model to see."""
    if len(text) <= max_chars:
        return text
    return text[: max(0, max_chars - len(CUT_MARKER))] + CUT_MARKER
