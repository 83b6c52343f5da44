"""The published reward for tool-using trajectories: format first, then word overlap, then a bonus for both tools."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_arpo.reward.base import gold_answers
from megatron_arpo.reward.format import TOOLS, read_answer
from megatron_arpo.reward.qa import best_f1
from megatron_arpo.types import LeafReward

TOOL_BONUS = 0.1


def deep_research(solution: str, answers: Sequence[str]) -> LeafReward:
    r"""-1 for a bad format or box; else F1 against the best gold, plus 0.1 if that is > 0 and both tools were used.

    Score and reason equal those of the ARPO repository's `reward_score/deep_research.py` on every input. A tool counts
    as used where its closing tag stands anywhere in the solution. Raises ValueError where a gold answer is not text.

    Example: deep_research("<think>a</think><answer>\\boxed{5}</answer>", ["5"]) has score 1.0 and parts
    {"format": 1.0, "f1": 1.0, "tool_bonus": 0.0}.
    """
    golds = gold_answers(answers)
    answer, reason = read_answer(solution)
    if answer is None:
        return LeafReward(score=-1.0, reason=reason, parts={"format": 0.0, "f1": 0.0, "tool_bonus": 0.0})
    f1 = best_f1(answer, golds)
    bonus = TOOL_BONUS if f1 > 0 and all(f"</{tool}>" in solution for tool in TOOLS) else 0.0
    score = f1 + bonus
    if bonus:
        reason = f"correct answer and calling search and python at the same time, get score: {score}"
    elif f1 > 0:
        reason = f"correct answer, get f1 score: {score}"
    else:
        reason = f"wrong answer but good format: {answer}"
    return LeafReward(score=score, reason=reason, parts={"format": 1.0, "f1": f1, "tool_bonus": bonus})
