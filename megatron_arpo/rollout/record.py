"""Rollout trees as JSON lines, one step a file, one tree a line: what a run folder keeps, replay and the viewer read.

The round trip is exact: floats are written by repr(). A prompt's metadata must itself be JSON (no tuples, no NaN).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_arpo.types import RolloutTree

_SCALARS = (bool, int, float, str)


def tree_to_json(tree: RolloutTree) -> dict[str, Any]:
    """The tree as dicts, lists and scalars under the field names of the records."""
    return _to_json(tree)


def tree_from_json(found: dict[str, Any]) -> RolloutTree:
    """The inverse of `tree_to_json`. ValueError where a field is missing, unknown or of the wrong type."""
    return _from_json(RolloutTree, found, "tree")


def write_step(path: str | Path, trees: Iterable[RolloutTree]) -> None:
    """Writes `trees` beside `path` and renames: `path` is there whole or not at all. ValueError for NaN or infinity."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for tree in trees:
            try:
                line = json.dumps(tree_to_json(tree), ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}: tree {tree.prompt.prompt_id} cannot be written as JSON: {error}") from error
            file.write(line + "\n")
    os.replace(partial, path)


def read_step(path: str | Path) -> list[RolloutTree]:
    """The trees of one file that `write_step` wrote. ValueError names file and line of a corrupt record."""
    trees: list[RolloutTree] = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                trees.append(tree_from_json(json.loads(line)))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not a rollout tree: {error}") from error
    return trees


def _to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and value and not isinstance(value[0], _SCALARS):
        return [_to_json(item) for item in value]
    return list(value) if isinstance(value, tuple) else value


@functools.cache
def _field_types(record: type) -> dict[str, Any]:
    return typing.get_type_hints(record)


def _from_json(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`: a record, tuple[X, ...], X | None, a literal or a scalar. Mappings are taken as they are."""
    if dataclasses.is_dataclass(kind):
        return _record_from_json(kind, value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return _tuple_from_json(arguments[0], value, where)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _from_json(arguments[0], value, where)
    if origin is typing.Literal and value not in arguments:
        raise ValueError(f"{where} must be one of {arguments}, got {value!r}")
    if kind in _SCALARS:
        _require(kind, (value,), where)
    return value


def _record_from_json(record: type, value: Any, where: str) -> Any:
    _require(dict, (value,), where)
    kinds = _field_types(record)
    if value.keys() != kinds.keys():
        missing, unknown = sorted(kinds.keys() - value.keys()), sorted(value.keys() - kinds.keys())
        raise ValueError(f"{where}: missing fields {missing}, unknown fields {unknown}")
    return record(**{name: _from_json(kinds[name], item, f"{where}.{name}") for name, item in value.items()})


def _tuple_from_json(kind: Any, value: Any, where: str) -> tuple[Any, ...]:
    _require(list, (value,), where)
    if kind in _SCALARS:
        _require(kind, value, where)
        return tuple(value)
    return tuple(_from_json(kind, item, f"{where}[{index}]") for index, item in enumerate(value))


def _require(kind: type, values: Iterable[Any], where: str) -> None:
    allowed = {int, float} if kind is float else {kind}
    wrong = {type(value) for value in values} - allowed
    if wrong:
        raise ValueError(f"{where} must be {kind.__name__}, got {', '.join(sorted(t.__name__ for t in wrong))}")
