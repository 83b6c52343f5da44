"""Buckets in files that both sides map: shared memory on one host, or a folder on a disk that both see.

Staged files are the shards of a Hugging Face folder. Files are made once and written over with every version: fresh pages of shared
memory cost ten times a copy into old ones. That is safe since an engine copies what it loads before it says that it has.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_arpo.engine.buckets import Bucket, Fragment
from megatron_arpo.engine.transport.base import IN_FLIGHT, FilesRoute

_PAGE = mmap.PAGESIZE
_SAFETENSORS_DTYPES = {
    "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "float8_e4m3fn": "F8_E4M3", "int64": "I64", "uint8": "U8",
}  # fmt: skip


def create_files(route: FilesRoute, buckets: Sequence[Bucket]) -> None:
    """Makes the route's files with room for what they will hold. Raises ValueError where there is none."""
    route.folder.mkdir(parents=True, exist_ok=True)
    needed: dict[Path, int] = {}
    for bucket in buckets:
        path = _path(route, bucket, len(buckets))
        needed[path] = max(needed.get(path, 0), _data_start(route, bucket) + bucket.num_bytes)
    try:
        for path, num_bytes in needed.items():
            with open(path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
        if route.staged:
            for bucket in buckets:
                with open(_path(route, bucket, len(buckets)), "r+b") as file:
                    file.write(_header(bucket))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ValueError(
            f"{route.folder} has no room for {sum(needed.values())} bytes of weights; make it larger (in a container: --shm-size), "
            f"or set weights.keep_old=false to have two buckets of weights.bucket_bytes there at a time"
        ) from error


def shard_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def weight_map(buckets: Sequence[Bucket]) -> dict[str, str]:
    """Tensor name -> staged file, as model.safetensors.index.json has it."""
    return {place.name: shard_name(bucket.index, len(buckets)) for bucket in buckets for place in bucket.places}


def _path(route: FilesRoute, bucket: Bucket, count: int) -> Path:
    return route.folder / (shard_name(bucket.index, count) if route.staged else f"slot-{bucket.index % IN_FLIGHT}")


def _header(bucket: Bucket) -> bytes:
    """Of a safetensors file, filled up with spaces so that tensors begin at a page."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for place in bucket.places:
        ends = [place.offset, place.offset + place.num_bytes]
        entries[place.name] = {"dtype": _SAFETENSORS_DTYPES[place.dtype], "shape": list(place.shape), "data_offsets": ends}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)
    return len(text).to_bytes(8, "little") + text


def _data_start(route: FilesRoute, bucket: Bucket) -> int:
    return len(_header(bucket)) if route.staged else 0


class _Maps:
    """Mapped buckets. They stay mapped from version to version: mapping 128 MiB anew takes as long as copying them. A reader maps all
    pages at once (`populate`), an actor rank has only those that it writes."""

    def __init__(self, route: FilesRoute, buckets: Sequence[Bucket], populate: bool) -> None:
        self._flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        self._route, self._count = route, len(buckets)
        self._starts = [_data_start(route, bucket) for bucket in buckets]
        self._maps: dict[Path, torch.Tensor] = {}

    def __getitem__(self, bucket: Bucket) -> torch.Tensor:
        path = _path(self._route, bucket, self._count)
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
        start = self._starts[bucket.index]
        return self._maps[path][start : start + bucket.num_bytes]

    def clear(self) -> None:
        self._maps.clear()


class FilesOutbox:
    def __init__(self, route: FilesRoute, buckets: Sequence[Bucket]) -> None:
        self._maps = _Maps(route, buckets, populate=False)

    def target(self, bucket: Bucket, fragment: Fragment) -> torch.Tensor:
        return bucket.fragment_view(self._maps[bucket], fragment)

    def send(self, bucket: Bucket) -> None:
        """The file is the message."""

    def close(self) -> None:
        self._maps.clear()


class FilesInbox:
    def __init__(self, route: FilesRoute, buckets: Sequence[Bucket]) -> None:
        self._maps = _Maps(route, buckets, populate=True)

    def receive(self, bucket: Bucket) -> None:
        """The file is the message."""

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        return self._maps[bucket]

    def close(self) -> None:
        self._maps.clear()
