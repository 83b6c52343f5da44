"""LLaMA-Factory's dataset_info.json -> the files it describes and how their rows are to be read.

Only local files of supervised demonstrations: what lies on a hub, preference pairs, images and tool descriptions are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_arpo.data.alpaca import AlpacaFields
from megatron_arpo.data.row_files import SUFFIXES, check_row_file
from megatron_arpo.data.sharegpt import ShareGptFields

FILE_NAME = "dataset_info.json"

_REMOTE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_KNOWN = ("file_name", "formatting", "columns", "tags", "split", "ranking")
_ALPACA_COLUMNS = ("prompt", "query", "response", "system", "history")
_SHAREGPT_COLUMNS = ("messages", "system")
_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant", "system_tag": "system_role"}
_UNUSED_TAGS = ("observation_tag", "function_tag")
"""They name roles that no row may have here, so that a row with one of them is refused when it is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationFile:
    """A file of demonstrations; `fields` None means that each row's own keys tell its format."""

    path: Path
    fields: ShareGptFields | AlpacaFields | None = None


def read_dataset_info(path: Path, names: Sequence[str]) -> tuple[DemonstrationFile, ...]:
    """The files of the described datasets `names`, in that order; a described folder stands for its files in name order.

    Columns that a description leaves out have LLaMA-Factory's names, and system and history, which have none, are not
    read. Raises ValueError naming file, dataset, key and fix.
    """
    try:
        described = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON in UTF-8 ({error}); correct it") from error
    if not isinstance(described, dict):
        raise ValueError(f"{path}: holds a {type(described).__name__}; write an object with one description a dataset")
    if not names:
        raise ValueError(f"{path}: sft.dataset is missing; name one of {', '.join(described)}")
    found: list[DemonstrationFile] = []
    for name in names:
        if not isinstance(described.get(name), dict):
            raise ValueError(f"{path}: sft.dataset={name!r} is not described there; use one of {', '.join(described)}")
        found += _files(described[name], path.parent, f"{path}, {name}")
    return tuple(found)


def _files(description: Mapping[str, Any], folder: Path, place: str) -> list[DemonstrationFile]:
    for key in _REMOTE:
        if description.get(key):
            raise ValueError(f"{place}: {key} is {description[key]!r}, which is not on this machine; download it and write file_name")
    for key in description:
        if key not in (*_KNOWN, *_REMOTE):
            raise ValueError(f"{place}: key {key!r} is not supported; use only {', '.join(_KNOWN)}")
    if description.get("ranking"):
        raise ValueError(f"{place}: ranking is true, but preference pairs are no demonstrations; use another dataset")
    if description.get("split", "train") != "train":
        raise ValueError(f"{place}: split is {description['split']!r}, but a local file has no splits; leave it out")
    if not isinstance(description.get("file_name"), str):
        raise ValueError(f"{place}: file_name is {description.get('file_name')!r}; write a file beside {FILE_NAME}")
    fields = _fields(description, place)
    path = folder / description["file_name"]
    paths = sorted(one for one in path.iterdir() if one.suffix in SUFFIXES) if path.is_dir() else [path]
    if not paths:
        raise ValueError(f"{place}: file_name is {path}, a folder without {' or '.join(SUFFIXES)} files; put some there")
    for one in paths:
        check_row_file(one)
    return [DemonstrationFile(path=one, fields=fields) for one in paths]


def _fields(description: Mapping[str, Any], place: str) -> ShareGptFields | AlpacaFields:
    columns = _texts(description, "columns", place)
    tags = _texts(description, "tags", place)
    formatting = description.get("formatting", "alpaca")
    if formatting == "alpaca":
        _refuse_unknown(columns, _ALPACA_COLUMNS, "columns", place)
        _refuse_unknown(tags, (), "tags", place)
        return AlpacaFields(**{"system": None, "history": None, **columns})
    if formatting == "sharegpt":
        _refuse_unknown(columns, _SHAREGPT_COLUMNS, "columns", place)
        _refuse_unknown(tags, (*_TAGS, *_UNUSED_TAGS), "tags", place)
        named = {field: tags.get(tag) for tag, field in _TAGS.items() if tag in tags}
        for role, default in (("user", "human"), ("assistant", "gpt")):
            named[role] = (named.get(role, default),)
        return ShareGptFields(**{"system": None, **columns, **named})
    raise ValueError(f"{place}: formatting is {formatting!r}; use alpaca or sharegpt")


def _texts(description: Mapping[str, Any], key: str, place: str) -> dict[str, str]:
    values = description.get(key, {})
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise ValueError(f"{place}: {key} is {values!r}; write names as text")
    return values


def _refuse_unknown(values: Mapping[str, str], known: Sequence[str], key: str, place: str) -> None:
    for name in values:
        if name not in known:
            fix = f"use only {', '.join(known)}" if known else "leave it out"
            raise ValueError(f"{place}: {key}.{name} is not supported; {fix}")
