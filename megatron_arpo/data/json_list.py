"""Reads a .json file that holds a list of rows, one row at a time: the list itself is never in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import ijson

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_json_list(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("FILE, row N", row) with N counted from 0.

    Raises ValueError where the file cannot be read, is not JSON in UTF-8, or is not a list of objects; rows before the
    broken place have been yielded by then.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    with file:
        _check_list(file, path)
        try:
            for index, row in enumerate(ijson.items(file, "item", use_float=True)):
                place = f"{path}, row {index}"
                if not isinstance(row, dict):
                    raise ValueError(f"{place}: is a {type(row).__name__}; write one object a row")
                yield place, row
        except RecursionError as error:
            raise ValueError(f"{path}: is nested too deeply; write a list of rows") from error
        except ijson.JSONError as error:
            reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
            raise ValueError(f"{path}: is not JSON in UTF-8 ({reason.splitlines()[0]}); write a list of rows") from error


def _check_list(file: BinaryIO, path: Path) -> None:
    """Leaves `file` where its JSON begins."""
    if file.read(len(_BYTE_ORDER_MARK)) != _BYTE_ORDER_MARK:
        file.seek(0)
    start = file.tell()
    first = b" "
    while first.isspace():
        first = file.read(1)
    file.seek(start)
    if first == b"{":
        raise ValueError(f"{path}: holds an object; write a list of rows, or name the file .jsonl if it has one row a line")
    if first != b"[":
        raise ValueError(f"{path}: is not JSON in UTF-8 (it begins with {first!r}); write a list of rows")
