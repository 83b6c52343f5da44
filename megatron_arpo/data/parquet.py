"""Reads parquet files row by row, one row group's batch at a time, with errors that name file, row and fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_BATCH_ROWS = 1024


def read_parquet(path: Path, required: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("FILE, row N", row) with N counted from 0; a column that a row lacks is None.

    Raises ValueError where the file cannot be read or one of the `required` columns is missing.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            for name in required:
                if name not in columns:
                    raise ValueError(f"{path}: column {name!r} is missing; add it (there are: {', '.join(columns)})")
            row = 0
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for held in batch.to_pylist():
                    yield f"{path}, row {row}", held
                    row += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: cannot be read as parquet ({reason}); write or download it again") from error
