"""Buckets in files that both sides map: shared memory on one host, or a folder on a disk that both see.

Files are made once and written over with every version: fresh pages of shared
memory cost ten times a copy into old ones. That is safe since an engine copies what it loads before it says that it has.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_arpo.engine.buckets import Bucket, Fragment
from megatron_arpo.engine.transport.base import IN_FLIGHT, FilesRoute


def create_files(folder: Path, buckets: Sequence[Bucket], names: Sequence[str] = (), heads: Sequence[bytes] = ()) -> FilesRoute:
    """Makes files with room for what they will hold: one for each bucket, of those names and behind those heads, or without them
    IN_FLIGHT that are used in turn. Raises ValueError where there is no room."""
    route = FilesRoute(folder=folder, names=tuple(names), starts=tuple(map(len, heads)))
    needed: dict[Path, int] = {}
    for bucket in buckets:
        path, start = _place(route, bucket)
        needed[path] = max(needed.get(path, 0), start + bucket.num_bytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, num_bytes in needed.items():
            with open(path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
        for name, head in zip(names, heads, strict=True):
            with open(folder / name, "r+b") as file:
                file.write(head)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ValueError(
            f"{folder} has no room for {sum(needed.values())} bytes of weights; make it larger (/dev/shm of a container: --shm-size), or "
            f"with weights.transport=shared_memory set weights.keep_old=false, to have two buckets of weights.bucket_bytes there"
        ) from error
    return route


def _place(route: FilesRoute, bucket: Bucket) -> tuple[Path, int]:
    """(file, first byte) of a bucket."""
    if route.names:
        return route.folder / route.names[bucket.index], route.starts[bucket.index]
    return route.folder / f"slot-{bucket.index % IN_FLIGHT}", 0


class _Maps:
    """Mapped buckets. They stay mapped from version to version: mapping 128 MiB anew takes as long as copying them. A reader maps all
    pages at once (`populate`), an actor rank has only those that it writes."""

    def __init__(self, route: FilesRoute, populate: bool) -> None:
        self._flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        self._route = route
        self._maps: dict[Path, torch.Tensor] = {}

    def __getitem__(self, bucket: Bucket) -> torch.Tensor:
        path, start = _place(self._route, bucket)
        if path not in self._maps:
            try:
                file = open(path, "r+b")  # noqa: SIM115 closed below
            except FileNotFoundError as error:
                raise ValueError(
                    f"{path} is not there: with weights.transport=shared_memory, actors and engines are on one host, with checkpoint all "
                    f"see weights.folder; use broadcast"
                ) from error
            with file:
                mapped = mmap.mmap(file.fileno(), 0, flags=self._flags)
            self._maps[path] = torch.frombuffer(mapped, dtype=torch.uint8)
        return self._maps[path][start : start + bucket.num_bytes]

    def clear(self) -> None:
        self._maps.clear()


class FilesOutbox:
    def __init__(self, route: FilesRoute) -> None:
        self._maps = _Maps(route, populate=False)

    def target(self, bucket: Bucket, fragment: Fragment) -> torch.Tensor:
        return bucket.fragment_view(self._maps[bucket], fragment)

    def send(self, bucket: Bucket) -> None:
        """The file is the message."""

    def close(self) -> None:
        self._maps.clear()


class FilesInbox:
    def __init__(self, route: FilesRoute) -> None:
        self._maps = _Maps(route, populate=True)

    def receive(self, bucket: Bucket) -> None:
        """The file is the message."""

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        return self._maps[bucket]

    def close(self) -> None:
        self._maps.clear()
