"""One ShareGPT row -> chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, str]
"""{"role": "system" | "user" | "assistant", "content": text}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGptFields:
    """Names of a row's columns, of a turn's keys, and of the roles; `system` None means that no column has it.

    Example: ShareGptFields(messages="messages", role="role", content="content", user=("user",), assistant=("assistant",))
    """

    messages: str = "conversations"
    system: str | None = "system"
    role: str = "from"
    content: str = "value"
    user: tuple[str, ...] = ("human", "user")
    assistant: tuple[str, ...] = ("gpt", "assistant")
    system_role: str = "system"


def parse_sharegpt(row: Mapping[str, Any], place: str, fields: ShareGptFields) -> tuple[Message, ...]:
    """The system message, if there is one, and then pairs of a user's and an assistant's message.

    A first turn of the system role stands in for the system column. Raises ValueError naming `place`, field and fix.
    """
    turns = row.get(fields.messages)
    if not isinstance(turns, list):
        raise ValueError(f"{place}: field {fields.messages!r} is {turns!r}; write a list of turns")
    system = row.get(fields.system) if fields.system else None
    if system is not None and not isinstance(system, str):
        raise ValueError(f"{place}: field {fields.system!r} is {system!r}; write it as text or leave it out")
    first = 0
    if turns and isinstance(turns[0], dict) and turns[0].get(fields.role) == fields.system_role:
        system, first = _content(turns[0], 0, place, fields), 1
    if len(turns) == first or (len(turns) - first) % 2:
        pair = f"a {fields.user[0]} and a {fields.assistant[0]} turn"
        raise ValueError(f"{place}: field {fields.messages!r} has {len(turns) - first} turns; write pairs of {pair}")
    messages = [{"role": "system", "content": system}] if system else []
    for index, turn in enumerate(turns[first:], start=first):
        content = _content(turn, index, place, fields)
        role, names = (("user", fields.user), ("assistant", fields.assistant))[(index - first) % 2]
        field = f"{fields.messages}[{index}]"
        if turn.get(fields.role) not in names:
            raise ValueError(f"{place}: field '{field}.{fields.role}' is {turn.get(fields.role)!r}; write {names[0]!r}, turns alternate")
        if role == "assistant" and not content.strip():
            raise ValueError(f"{place}: field '{field}.{fields.content}' is empty; write a response to imitate")
        messages.append({"role": role, "content": content})
    return tuple(messages)


def _content(turn: Any, index: int, place: str, fields: ShareGptFields) -> str:
    if isinstance(turn, dict) and isinstance(turn.get(fields.content), str):
        return turn[fields.content]
    shape = f"{{{fields.role!r}: {fields.user[0]!r} or {fields.assistant[0]!r}, {fields.content!r}: text}}"
    raise ValueError(f"{place}: field '{fields.messages}[{index}]' is {turn!r}; write {shape}")
