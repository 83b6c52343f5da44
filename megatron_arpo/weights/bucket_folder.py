"""Buckets as the shards of a Hugging Face folder, which actor ranks fill through the files transport."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

from megatron_arpo.engine.buckets import Bucket
from megatron_arpo.engine.transport.base import FilesRoute
from megatron_arpo.engine.transport.files import create_files
from megatron_arpo.weights.hf_files import copy_hf_files
from megatron_arpo.weights.hf_folder import set_dtype, shard_name, write_index
from megatron_arpo.weights.safetensors_header import Entry, header


def create_shards(folder: Path, buckets: Sequence[Bucket]) -> FilesRoute:
    """A shard for each bucket, its tensors still to be filled in. Raises ValueError where there is no room."""
    names = [shard_name(bucket.index, len(buckets)) for bucket in buckets]
    return create_files(folder, buckets, names, [_head(bucket) for bucket in buckets])


def write_config(folder: Path, buckets: Sequence[Bucket], config_from: Path) -> None:
    """All that a Hugging Face folder needs beside its shards: config and tokenizer of `config_from`, and the index."""
    copy_hf_files(config_from, folder)
    places = [place for bucket in buckets for place in bucket.places]
    set_dtype(folder / "config.json", max(places, key=lambda place: place.num_bytes).torch_dtype)
    weight_map = {place.name: shard_name(bucket.index, len(buckets)) for bucket in buckets for place in bucket.places}
    write_index(folder, weight_map, sum(place.num_bytes for place in places))


def _head(bucket: Bucket) -> bytes:
    """As long as whole pages, so that the tensors can be mapped."""
    entries = [
        Entry(name=place.name, dtype=place.torch_dtype, shape=place.shape, offset=place.offset, num_bytes=place.num_bytes)
        for place in bucket.places
    ]
    return header(entries, alignment=mmap.PAGESIZE)
