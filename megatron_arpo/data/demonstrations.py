"""Demonstrations for the cold start: ShareGPT and Alpaca rows on disk -> chat messages, as a stream.

Which tokens of them are learned is left to `chat.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_arpo.data.alpaca import AlpacaFields, parse_alpaca
from megatron_arpo.data.dataset_info import FILE_NAME, DemonstrationFile, read_dataset_info
from megatron_arpo.data.prompts import repair_escapes
from megatron_arpo.data.row_files import check_row_file, read_rows
from megatron_arpo.data.sharegpt import Message, ShareGptFields, parse_sharegpt


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation that ends with an assistant's message, and where it stands, for errors.

    Example: Demonstration(place="x.jsonl, line 1", was_repaired=False,
    messages=({"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "<think>...</think>2"}))
    """

    place: str
    messages: tuple[Message, ...]
    was_repaired: bool
    """A broken escape (see prompts.repair_escapes) was repaired in it."""


def find_demonstrations(path: Path, dataset: str | None) -> tuple[DemonstrationFile, ...]:
    """The files behind sft.demonstrations and sft.dataset; reads none of their rows.

    `path` is a .jsonl, .json or .parquet file, or LLaMA-Factory's dataset_info.json or the folder it lies in; `dataset`
    then names what to take from it, several with commas between them. Raises ValueError naming file, value and fix.
    """
    info = path / FILE_NAME if path.is_dir() else path
    if info.name == FILE_NAME:
        return read_dataset_info(info, [name.strip() for name in (dataset or "").split(",") if name.strip()])
    if dataset is not None:
        raise ValueError(f"sft.dataset={dataset!r} needs sft.demonstrations to be a {FILE_NAME} or its folder, not {path}; leave it out")
    check_row_file(path)
    return (DemonstrationFile(path=path),)


def read_demonstrations(files: Sequence[DemonstrationFile]) -> Iterator[Demonstration]:
    """All rows of `files` in order. Raises ValueError naming file, row or line, field and fix, and where there is no row."""
    for file in files:
        is_empty = True
        for place, row in read_rows(file.path):
            is_empty = False
            repaired = repair_escapes(row)
            messages = _parse(repaired, place, file.fields)
            _check_text(messages, place)
            yield Demonstration(place=place, messages=messages, was_repaired=repaired != row)
        if is_empty:
            raise ValueError(f"{file.path}: holds no rows; give at least one demonstration")


def _parse(row: Mapping[str, Any], place: str, fields: ShareGptFields | AlpacaFields | None) -> tuple[Message, ...]:
    match fields:
        case ShareGptFields():
            return parse_sharegpt(row, place, fields)
        case AlpacaFields():
            return parse_alpaca(row, place, fields)
    if row.get("conversations") is not None:
        return parse_sharegpt(row, place, ShareGptFields())
    if row.get("instruction") is not None or row.get("output") is not None:
        return parse_alpaca(row, place, AlpacaFields())
    raise ValueError(
        f"{place}: has neither 'conversations' (ShareGPT) nor 'instruction' and 'output' (Alpaca), but {', '.join(row) or 'nothing'}; "
        f"add them, or describe the columns in a {FILE_NAME}"
    )


def _check_text(messages: Sequence[Message], place: str) -> None:
    for message in messages:
        try:
            message["content"].encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{place}: the {message['role']}'s text holds half of a surrogate pair ({error.reason}); remove it") from error
