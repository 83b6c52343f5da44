import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_arpo.agent_tools.parse import CUT_MARKER, cut_text, format_result, parse_tool_call
from megatron_arpo.types import ToolCall

NAMES = ("python", "search")


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("<think>add</think><python>\nprint(2 + 3)\n</python>", "python", "print(2 + 3)"),
        ("<search>capital of Spain</search>\n\n", "search", "capital of Spain"),
        ("<python>1</python>>\n", "python", "1"),
        ("<python>1</python>Then", "python", "1"),
        ("<python>1</python> so <python>2</python>", "python", "2"),
        ("<python>1</python> so <search>two</search>", "search", "two"),
        ("<search>a</search> so <python>'</search>'</python>", "python", "'</search>'"),
        ("<python>if a < b > c: pass</python>", "python", "if a < b > c: pass"),
    ],
)
def test_the_last_block_is_the_call(text, name, arguments):
    assert parse_tool_call(text, NAMES) == ToolCall(name=name, arguments=arguments)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no tags",
        "print(1)</python>",
        "<python> \n</python>",
        "<python>1",
        "<python>1</python> and so on",
        "<browse>page</browse>",
        "</python><python>",
    ],
)
def test_texts_that_end_in_no_call(text):
    assert parse_tool_call(text, NAMES) is None


def test_no_tools_no_calls():
    assert parse_tool_call("<python>1</python>", ()) is None


@given(st.text(), st.text().filter(lambda code: code.strip() and "python>" not in code))
def test_arguments_come_back_whatever_stands_before(before, code):
    assert parse_tool_call(f"{before}<python>{code}</python>", ["python"]) == ToolCall(name="python", arguments=code.strip())


def test_result_in_the_published_form():
    assert format_result("5") == " <result>\n5\n</result>"


def test_cut_is_visible_and_holds_the_limit():
    assert cut_text("x" * 16, 16) == "x" * 16
    assert cut_text("x" * 17, 16) == "x" * (16 - len(CUT_MARKER)) + CUT_MARKER
