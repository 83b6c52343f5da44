"""The Reward role, the registry by name, and the check of gold answers that every reward starts with."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches

from megatron_arpo.types import LeafReward

Reward = Callable[[str, Sequence[str]], LeafReward]
"""(solution text, gold answers) -> score."""

BUILT_IN: Mapping[str, str] = {
    "deep_research": "megatron_arpo.reward.deep_research:deep_research",
    "math": "megatron_arpo.reward.math:math",
    "qa": "megatron_arpo.reward.qa:qa",
}
"""Name -> import path; a reward is imported when it is asked for."""


def get_reward(name: str) -> Reward:
    """The reward called `name`: a built-in one, or the user's function at import path "pkg.module:function".

    What a user's function returns is checked at every call. Raises ValueError for a name that leads to no function.
    """
    if name in BUILT_IN:
        return _import_function(BUILT_IN[name])
    if ":" not in name:
        nearest = get_close_matches(name, BUILT_IN, n=1, cutoff=0.4)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"reward={name!r} is unknown; use {', '.join(BUILT_IN)} or a function's path 'pkg.module:function'{hint}")
    return _checked(name, _import_function(name))


def _import_function(path: str) -> Reward:
    module_name, _, function_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError, TypeError) as error:  # an empty or a relative name is no ImportError
        raise ValueError(f"reward={path!r}: cannot import {module_name!r} ({error}); install it or put its folder on PYTHONPATH") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"reward={path!r}: {module_name!r} has no function {function_name!r}; name one of (solution, answers)")
    return function


def _checked(name: str, function: Reward) -> Reward:
    @functools.wraps(function)
    def reward(solution: str, answers: Sequence[str]) -> LeafReward:
        result = function(solution, answers)
        if not isinstance(result, LeafReward) or not math.isfinite(result.score):
            raise ValueError(f"reward={name!r} returned {result!r}; it must return a LeafReward with a finite score")
        return result

    return reward


def gold_answers(answers: str | Iterable[str]) -> tuple[str, ...]:
    """`answers` as a tuple; one string is one gold. Raises ValueError for anything that is not text.

    Example: gold_answers("5") == ("5",)
    """
    if isinstance(answers, str):
        return (answers,)
    if isinstance(answers, Mapping) or not isinstance(answers, Iterable):
        raise ValueError(f"answers={answers!r} is of type {type(answers).__name__}; give gold answers as a string or as strings")
    golds = tuple(answers)
    for index, gold in enumerate(golds):
        if not isinstance(gold, str):
            raise ValueError(f"answers[{index}]={gold!r} is of type {type(gold).__name__}; write it as a string, {str(gold)!r}")
    return golds
