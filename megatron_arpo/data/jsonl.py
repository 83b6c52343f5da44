"""Reads jsonl files row by row, with errors that name file, line and fix."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("FILE, line N", row) for every line that is not blank; N counts from 1.

    Raises ValueError where the file cannot be read and where a line is not a JSON object in UTF-8.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    with file:
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}: is not JSON in UTF-8 ({error}); write one object a line") from error
            if not isinstance(row, dict):
                raise ValueError(f"{place}: holds a {type(row).__name__}; write one object a line")
            yield place, row
