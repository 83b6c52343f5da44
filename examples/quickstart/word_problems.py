"""The quickstart's text: arithmetic in words, and demonstrations that solve it with Python, a stated share flawed.

Standard library only; `make_task.py` writes files of it. The flaws leave a fine-tuned model right on about half of the
problems, which is what reinforcement learning needs to have something to choose from.
"""

from __future__ import annotations

import ast
import operator
import random
from dataclasses import dataclass
from typing import Literal

Flaw = Literal["operation", "digit", "no_tool", "copy", "format"]
"""What is wrong with a demonstration: another operation or one left out, a digit of the question mis-copied, an answer
guessed without the tool, the result mis-copied, or an answer without \\boxed{}, which alone breaks the format."""


@dataclass(frozen=True, slots=True)
class Template:
    """A kind of problem. `mistakes` are two wrong (expression, plan) pairs, the more tempting one first."""

    question: str
    expression: str
    plan: str
    mistakes: tuple[tuple[str, str], tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Example: Problem(question="What is 769 * 76 + 62?", expression="769 * 76 + 62", plan="multiply then add",
    mistakes=(("769 * 76", "multiply"), ("769 + 76", "add")), num_steps=2)"""

    question: str
    expression: str
    plan: str
    mistakes: tuple[tuple[str, str], tuple[str, str]]
    num_steps: int

    @property
    def answer(self) -> str:
        return str(evaluate(self.expression))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A response to a problem in the published turn format; `flaw` is None where it is right.

    Example response: "<think> add </think><python> print(112 + 12) </python> <result>\\n124\\n</result><think> done
    </think><answer> \\boxed{124} </answer>", on one line but for the result's.
    """

    problem: Problem
    response: str
    flaw: Flaw | None


_ADD, _SUBTRACT, _MULTIPLY = ("{a} + {b}", "add"), ("{a} - {b}", "subtract"), ("{a} * {b}", "multiply")

TEMPLATES: dict[int, tuple[Template, ...]] = {
    1: (
        Template("What is {a} + {b}?", *_ADD, (_MULTIPLY, _SUBTRACT)),
        Template("What is {a} - {b}?", *_SUBTRACT, (_ADD, _MULTIPLY)),
        Template("What is {a} * {b}?", *_MULTIPLY, (_ADD, _SUBTRACT)),
        Template("{name} has {a} {things} and buys {b} more. How many {things} now?", *_ADD, (_SUBTRACT, _MULTIPLY)),
        Template("{name} had {a} {things} and gave away {b}. How many {things} are left?", *_SUBTRACT, (_ADD, _MULTIPLY)),
        Template("A box holds {a} {things}. How many {things} are in {b} boxes?", *_MULTIPLY, (_ADD, _SUBTRACT)),
    ),
    2: (
        Template("What is {a} * {b} + {c}?", "{a} * {b} + {c}", "multiply then add", (_MULTIPLY, _ADD)),
        Template(
            "{name} has {a} boxes of {b} {things} and buys {c} more. How many {things} now?",
            "{a} * {b} + {c}",
            "multiply then add",
            (_MULTIPLY, ("{b} + {c}", "add")),
        ),
        Template(
            "{name} has {a} boxes of {b} {things} and gave away {c}. How many {things} are left?",
            "{a} * {b} - {c}",
            "multiply then subtract",
            (_MULTIPLY, ("{b} - {c}", "subtract")),
        ),
        Template(
            "{name} has {a} red and {b} blue {things} and gave away {c}. How many {things} are left?",
            "{a} + {b} - {c}",
            "add then subtract",
            (_ADD, ("{a} - {c}", "subtract")),
        ),
        Template(
            "{name} puts {a} red and {b} blue {things} in each of {c} boxes. How many {things} in total?",
            "({a} + {b}) * {c}",
            "add then multiply",
            (_ADD, ("{b} * {c}", "multiply")),
        ),
    ),
}
"""Templates by number of steps."""

NAMES = ("Tom", "Mia", "Sam", "Ana", "Leo", "Eva", "Ben", "Zoe")
THINGS = ("apples", "pens", "coins", "books", "cards", "stamps", "shells", "beads")

FLAW_SHARE: dict[int, float] = {1: 0.30, 2: 0.75}
"""Share of flawed demonstrations by number of steps. With these, fine-tuning on 12,800 demonstrations twice leaves a
sampled held-out reward of about 0.45; at 0.65 for two steps greedy decoding starts too high to leave room."""

FLAW_WEIGHTS: dict[int, dict[Flaw, int]] = {
    1: {"operation": 45, "digit": 15, "no_tool": 20, "copy": 10, "format": 10},
    2: {"operation": 82, "digit": 4, "no_tool": 6, "copy": 4, "format": 4},
}
"""How flaws are spread, in percent, by number of steps."""

_TEMPTING_MISTAKE_SHARE = 0.85
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def evaluate(expression: str) -> int:
    """Value of integers under +, - and *; ValueError for anything else."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=number) if type(number) is int:  # a bool is an int, too
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
        raise ValueError(f"{expression!r} is not integers under +, - and *")

    return value(ast.parse(expression, mode="eval").body)


def random_stream(seed: int, name: str) -> random.Random:
    """Generators of different names are independent, so that one split does not change with another's size."""
    return random.Random(f"{seed}/{name}")


def draw_problem(rng: random.Random) -> Problem:
    """One step or two with equal probability; operands of two and three digits."""
    num_steps = 2 if rng.random() < 0.5 else 1
    template = rng.choice(TEMPLATES[num_steps])
    a, b, c = rng.randint(112, 989), rng.randint(12, 98), rng.randint(12, 98)
    words = {"name": rng.choice(NAMES), "things": rng.choice(THINGS)}
    if rng.random() < 0.5 and not template.question.startswith("A box"):
        b = rng.randint(101, max(101, a) if "-" in template.expression else 999)
    return fill(template, num_steps, a=a, b=b, c=c, **words)


def fill(template: Template, num_steps: int, **values: int | str) -> Problem:
    """The template's problem with values for a, b, c, name and things."""
    (first, first_plan), (second, second_plan) = template.mistakes
    return Problem(
        question=template.question.format(**values),
        expression=template.expression.format(**values),
        plan=template.plan,
        mistakes=((first.format(**values), first_plan), (second.format(**values), second_plan)),
        num_steps=num_steps,
    )


def draw_distinct_problems(rng: random.Random, num_problems: int, taken: set[str]) -> list[Problem]:
    """Problems whose questions are not in `taken`, where they are added. Each template has over 400,000 questions."""
    problems: list[Problem] = []
    while len(problems) < num_problems:
        problem = draw_problem(rng)
        if problem.question not in taken:
            taken.add(problem.question)
            problems.append(problem)
    return problems


def demonstrate(rng: random.Random, problem: Problem) -> Demonstration:
    """A right response, or with probability FLAW_SHARE a flawed one."""
    flaw: Flaw | None = None
    if rng.random() < FLAW_SHARE[problem.num_steps]:
        weights = FLAW_WEIGHTS[problem.num_steps]
        flaw = rng.choices(list(weights), list(weights.values()))[0]
    return Demonstration(problem=problem, response=_response(rng, problem, flaw), flaw=flaw)


def _response(rng: random.Random, problem: Problem, flaw: Flaw | None) -> str:
    expression, plan = problem.expression, problem.plan
    if flaw == "operation":
        expression, plan = problem.mistakes[0 if rng.random() < _TEMPTING_MISTAKE_SHARE else 1]
    if flaw == "digit":
        expression = _change_digit(rng, expression)
    result = str(evaluate(expression))
    if flaw == "no_tool":
        return f"<think> easy </think><answer> \\boxed{{{_change_digit(rng, result)}}} </answer>"
    answer = _change_digit(rng, result) if flaw == "copy" else result
    boxed = answer if flaw == "format" else f"\\boxed{{{answer}}}"
    return (
        f"<think> {plan} </think><python> print({expression}) </python> <result>\n{result}\n</result>"
        f"<think> done </think><answer> {boxed} </answer>"
    )


def _change_digit(rng: random.Random, text: str) -> str:
    """One digit replaced, never by 0: code with a leading zero would be a syntax error rather than a wrong number."""
    index = rng.choice([i for i, character in enumerate(text) if character.isdigit()])
    return text[:index] + rng.choice([d for d in "123456789" if d != text[index]]) + text[index + 1 :]
