import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_arpo.reward.base import get_reward
from megatron_arpo.reward.deep_research import deep_research
from megatron_arpo.reward.format import format_fault, last_boxed, read_answer
from megatron_arpo.types import LeafReward

GOLDEN = Path(__file__).parent / "data" / "deep_research_golden.jsonl"
"""Scores and reasons of the published reward on random solutions, most of them odd."""

SEARCH = "<search>q</search><result>r</result>"
PYTHON = "<python>1</python><result>1</result>"


def solution(answer: str, calls: str = "") -> str:
    return f"<think>t</think>{calls}<answer>{answer}</answer>"


def test_equals_the_published_reward():
    rows = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 400
    for row in rows:
        got = deep_research(row["solution"], row["answer"])
        assert (got.score, got.reason) == (row["score"], row["reason"]), row
        assert got.parts["format"] == (row["score"] != -1)


def test_parts_by_hand():
    """Predicted {paris, france}, gold {paris}: P = 1/2, R = 1, F1 = 2/3."""
    f1 = 2 / 3
    one_tool = deep_research(solution("\\boxed{Paris, France}", SEARCH), ["London", "Paris"])
    both_tools = deep_research(solution("\\boxed{Paris, France}", SEARCH + PYTHON), ["London", "Paris"])
    assert one_tool.parts == {"format": 1.0, "f1": pytest.approx(f1), "tool_bonus": 0.0}
    assert one_tool.score == pytest.approx(f1)
    assert both_tools.parts == {"format": 1.0, "f1": pytest.approx(f1), "tool_bonus": 0.1}
    assert both_tools.score == pytest.approx(f1 + 0.1)
    assert deep_research(solution("\\boxed{Rome}", SEARCH + PYTHON), ["Paris"]).score == 0.0


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("<think><answer>\\boxed{1}</answer>", "<think> </think> not paired"),
        ("<answer>\\boxed{1}</answer>", "<think> or </think> not found"),
        ("<think></think>", "<answer> or </answer> not found"),
        (solution("\\boxed{1}", "<search>q</search>"), "search/result tags are incomplete"),
        (solution("", "<python><result></python></result>"), "python/result tags are nested in the wrong order"),
        (solution("\\boxed{1}", "<search>q</search><result><search></result>"), None),  # results are not looked into
        ("<think></think></answer>\\boxed{1}<answer>", "<answer> must be before </answer>"),
        (solution("1") + "\\boxed{1}", "answer is missing \\boxed{} format"),
        (solution("\\boxed{1}", SEARCH + PYTHON), None),
    ],
)
def test_format_faults(text, fault):
    assert format_fault(text) == fault


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{a} and \\boxed{b}", "b"),
        ("\\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{a} \\boxed b c$ d", "b c"),
    ],
)
def test_last_boxed(text, answer):
    assert last_boxed(text) == (answer, "")


@pytest.mark.parametrize("text", ["\\boxed{a", "\\boxed}{}", "none"])
def test_boxes_that_do_not_close(text):
    assert last_boxed(text) == (None, "argument of type 'NoneType' is not iterable")


def test_a_box_that_does_not_begin_as_one():
    assert last_boxed("\\boxed{a} \\boxed[b]{c}") == (None, "")


@given(st.text(st.characters(exclude_characters="{}<>$\\"), max_size=30))
def test_a_boxed_answer_is_read_as_written(answer):
    assert read_answer(solution(f"x \\boxed{{{answer}}} y")) == (answer, "")


def test_one_string_is_one_gold():
    assert deep_research(solution("\\boxed{5}"), "5") == deep_research(solution("\\boxed{5}"), ["5"])


@pytest.mark.parametrize("answers", [None, 5, {"target": "5"}, [5], ["5", None], b"5"])
def test_golds_that_are_not_text(answers):
    with pytest.raises(ValueError, match="answers"):
        deep_research(solution("\\boxed{5}"), answers)


def test_registry():
    assert get_reward("deep_research") is deep_research
    assert get_reward("megatron_arpo.reward.deep_research:deep_research")(solution("\\boxed{5}"), ["5"]).score == 1.0
    with pytest.raises(ValueError, match=r"deep_research, math, qa.*did you mean 'deep_research'"):
        get_reward("deepresearch")
    with pytest.raises(ValueError, match="cannot import 'no_such_module'"):
        get_reward("no_such_module:reward")
    with pytest.raises(ValueError, match="has no function 'no_such_function'"):
        get_reward("megatron_arpo.reward.qa:no_such_function")
    for name in ("", ":", ":f", "json:", ".x:f"):
        with pytest.raises(ValueError, match="reward="):
            get_reward(name)


def bare_number(solution, answers):
    return 1.0


def not_a_number(solution, answers):
    return LeafReward(score=float("nan"))


@pytest.mark.parametrize("function", [bare_number, not_a_number])
def test_a_users_function_must_return_a_finite_reward(function):
    with pytest.raises(ValueError, match="LeafReward with a finite score"):
        get_reward(f"{__name__}:{function.__name__}")("solution", ["gold"])
