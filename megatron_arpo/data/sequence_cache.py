"""Token sequences with a loss mask, on disk: written once as a stream, then read at random through the page cache.

A cache is a folder of three flat arrays and a description; it takes five bytes a token and no memory of its own.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_DESCRIPTION = "description.json"
_TOKEN_IDS, _LOSS_MASK, _OFFSETS = "token_ids.int32", "loss_mask.uint8", "offsets.int64"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """Sequences laid end to end. Sequence b holds the tokens from lengths[:b].sum() on.

    token_ids: int32 [tokens]; loss_mask: uint8 [tokens], 1 where a token is learned; lengths: int64 [sequences].
    Example: sequences (5, 6) and (7,) are token_ids [5, 6, 7], lengths [2, 1].
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    lengths: np.ndarray

    def sequences(self) -> list[tuple[list[int], list[int]]]:
        """(token ids, loss mask) of each sequence."""
        ends = np.cumsum(self.lengths).tolist()
        ids, mask = self.token_ids.tolist(), self.loss_mask.tolist()
        return [(ids[start:end], mask[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


class SequenceCache:
    """An opened cache. It travels to another process as its path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._token_ids = _open(folder / _TOKEN_IDS, np.int32)
        self._loss_mask = _open(folder / _LOSS_MASK, np.uint8)
        self._offsets = _open(folder / _OFFSETS, np.int64)

    def __reduce__(self) -> tuple[type[SequenceCache], tuple[Path]]:
        return SequenceCache, (self.folder,)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def gather(self, indices: np.ndarray) -> SequenceBatch:
        """A copy of the sequences `indices`, in their order."""
        starts, ends = self._offsets[indices], self._offsets[indices + 1]
        spans = [slice(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        return SequenceBatch(
            np.concatenate([self._token_ids[span] for span in spans]),
            np.concatenate([self._loss_mask[span] for span in spans]),
            np.asarray(ends - starts),
        )


def _open(path: Path, dtype: type) -> np.ndarray:
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r"))  # a plain array over the same pages: a memmap's slices are slow to make


def read_description(folder: Path) -> dict[str, Any] | None:
    """{"key", "counts", ...} of a finished cache; None where there is no whole one in this format."""
    try:
        description = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    sizes = description.get("bytes", {})
    is_whole = all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())
    return description if is_whole and description.get("format") == _FORMAT else None


class CacheWriter:
    """Fills a cache beside `folder` and puts it in place at `finish`; a crash before that leaves nothing that opens.

    Used as a context manager, which removes what is unfinished. Raises ValueError where the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._aside = folder.with_name(f".{folder.name}.tmp")

    def __enter__(self) -> CacheWriter:
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir(parents=True)
        self._files = {name: (self._aside / name).open("wb") for name in (_TOKEN_IDS, _LOSS_MASK, _OFFSETS)}
        self._num_tokens = 0
        self._write(_OFFSETS, np.zeros(1, np.int64))
        return self

    def add(self, sequences: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Appends (token ids, loss mask) pairs."""
        for token_ids, loss_mask in sequences:
            self._num_tokens += len(token_ids)
            self._write(_TOKEN_IDS, np.asarray(token_ids, np.int32))
            self._write(_LOSS_MASK, np.asarray(loss_mask, np.uint8))
            self._write(_OFFSETS, np.asarray([self._num_tokens], np.int64))

    def finish(self, key: str, counts: Mapping[str, int]) -> None:
        """Puts the cache in place; `key` and `counts` are kept for `read_description`."""
        sizes = {name: file.tell() for name, file in self._files.items()}
        description = {"format": _FORMAT, "key": key, "counts": dict(counts), "bytes": sizes}
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        (self._aside / _DESCRIPTION).write_text(json.dumps(description, indent=1), encoding="utf-8")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._aside.rename(self._folder)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        shutil.rmtree(self._aside, ignore_errors=True)
        for file in self._files.values():
            with contextlib.suppress(OSError):  # what a full disk did not take
                file.close()
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            free = shutil.disk_usage(self._folder.parent).free
            raise ValueError(
                f"{self._folder}: the disk is full ({free >> 20} MiB free), tokenised sequences take five bytes a token; free space or "
                f"choose another run.dir"
            ) from error

    def _write(self, name: str, values: np.ndarray) -> None:
        self._files[name].write(values.tobytes())
