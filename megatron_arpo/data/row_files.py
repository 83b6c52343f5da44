"""Files of rows in any of the three formats -> (place, row) pairs, read as a stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_arpo.data.json_list import read_json_list
from megatron_arpo.data.jsonl import read_jsonl
from megatron_arpo.data.parquet import read_parquet

SUFFIXES = (".jsonl", ".json", ".parquet")


def check_row_file(path: Path) -> None:
    """Raises ValueError where `path` is no file that `read_rows` reads."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: suffix {path.suffix!r} is unknown; give a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file")
    if not path.is_file():
        raise ValueError(f"{path}: is not a file; check the path")


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("FILE, line N" or "FILE, row N", row). Raises ValueError naming file, line or row, and fix."""
    check_row_file(path)
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    return read_json_list(path) if path.suffix == ".json" else read_parquet(path)
