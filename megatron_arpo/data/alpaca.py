"""One Alpaca row -> chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_arpo.data.sharegpt import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class AlpacaFields:
    """Names of a row's columns; None means that no column has it.

    Example: AlpacaFields(prompt="question", query=None, response="solution")
    """

    prompt: str = "instruction"
    query: str | None = "input"
    response: str = "output"
    system: str | None = "system"
    history: str | None = "history"


def parse_alpaca(row: Mapping[str, Any], place: str, fields: AlpacaFields) -> tuple[Message, ...]:
    """The system message, if there is one, the pairs of the history, and then the row's own pair.

    The user's message is instruction and input, a line break between them where both are there. Raises ValueError naming
    `place`, field and fix.

    Example: {"instruction": "Add.", "input": "1 1", "output": "2"} gives "Add.\\n1 1" and "2".
    """
    question = "\n".join(part for part in (_text(row, fields.prompt, place), _text(row, fields.query, place)) if part)
    if not question:
        raise ValueError(f"{place}: field {fields.prompt!r} is {row.get(fields.prompt)!r}; write the instruction as text")
    system = _text(row, fields.system, place)
    messages = [{"role": "system", "content": system}] if system else []
    history = (row.get(fields.history) if fields.history else None) or []
    if not isinstance(history, list):
        raise ValueError(f"{place}: field {fields.history!r} is {history!r}; write a list of [instruction, response]")
    for index, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) and text.strip() for text in pair):
            raise ValueError(f"{place}: field '{fields.history}[{index}]' is {pair!r}; write [instruction, response], both text")
        messages += _pair(*pair)
    response = _text(row, fields.response, place)
    if not response.strip():
        raise ValueError(f"{place}: field {fields.response!r} is empty; write a response to imitate")
    return (*messages, *_pair(question, response))


def _text(row: Mapping[str, Any], field: str | None, place: str) -> str:
    """Empty where there is no such column or it is null."""
    value = row.get(field) if field else None
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{place}: field {field!r} is {value!r}; write it as text")
    return value or ""


def _pair(question: str, response: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": response}]
