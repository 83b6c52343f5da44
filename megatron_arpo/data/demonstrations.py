"""Demonstrations for the cold start: ShareGPT files -> context messages and the response to imitate."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_arpo.data.jsonl import read_jsonl

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """What was said, and the answer to learn; of several turns the last answer only.

    Example: Demonstration(messages=({"role": "user", "content": "1 + 1?"},), response="<think>...</think>2")
    """

    messages: tuple[Mapping[str, str], ...]
    response: str


def load_demonstrations(path: str | Path) -> list[Demonstration]:
    """Reads ShareGPT rows: {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}.

    .jsonl has one a line, .json a list of them. "user" and "assistant" are other names for "human" and "gpt"; a row may
    have "system". All pairs but the last become context. Raises ValueError naming file, row or line, field and fix.
    """
    path = Path(path)
    if path.suffix not in (".jsonl", ".json"):
        raise ValueError(f"{path}: suffix {path.suffix!r} is unknown; give a .jsonl or a .json file of ShareGPT rows")
    rows = read_jsonl(path) if path.suffix == ".jsonl" else _read_json(path)
    found = [_parse_row(row, place) for place, row in rows]
    if not found:
        raise ValueError(f"{path}: holds no rows; give at least one demonstration")
    return found


def _read_json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON in UTF-8 ({error}); write a list of ShareGPT rows") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path}: holds a {type(rows).__name__}; write a list of ShareGPT rows")
    for index, row in enumerate(rows):
        place = f"{path}, row {index}"
        if not isinstance(row, dict):
            raise ValueError(f"{place}: is a {type(row).__name__}; write an object with 'conversations'")
        yield place, row


def _parse_row(row: Mapping[str, Any], place: str) -> Demonstration:
    turns = row.get("conversations")
    if not isinstance(turns, list) or not turns or len(turns) % 2:
        shown = f"a list of {len(turns)}" if isinstance(turns, list) else repr(turns)
        raise ValueError(f"{place}: field 'conversations' is {shown}; write pairs of a human and a gpt turn")
    messages = [_parse_turn(turn, index, place) for index, turn in enumerate(turns)]
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise ValueError(f"{place}: field 'system' is {system!r}; write it as text or leave it out")
    context = [{"role": "system", "content": system}] if system else []
    response = messages.pop()["content"]
    if not response.strip():
        raise ValueError(f"{place}: field 'conversations[{len(messages)}].value' is empty; write a response to imitate")
    return Demonstration(messages=(*context, *messages), response=response)


def _parse_turn(turn: Any, index: int, place: str) -> dict[str, str]:
    field = f"conversations[{index}]"
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise ValueError(f"{place}: field {field!r} is {turn!r}; write {{'from': 'human' or 'gpt', 'value': text}}")
    expected = ("human", "gpt")[index % 2]
    role = _ROLES.get(turn["from"]) if isinstance(turn.get("from"), str) else None
    if role != _ROLES[expected]:
        raise ValueError(f"{place}: field '{field}.from' is {turn.get('from')!r}; write {expected!r}, turns alternate")
    return {"role": role, "content": turn["value"]}
