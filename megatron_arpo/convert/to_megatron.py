"""A checkpoint of any kind -> a Megatron dist-checkpoint that any layout loads.

The save plan is lazy: where each tensor goes is decided from shapes alone, and its bytes are made a block at a time when they are
written. torch's own FileSystemWriter wants whole tensors, and holds the last of every name until a file is finished; what is taken
from torch here are its records (Metadata, chunks, places) and the container that torch.save puts around a tensor's bytes.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_arpo.convert.dist_checkpoint import LAYERS, key_name
from megatron_arpo.convert.fuse import fused
from megatron_arpo.convert.source import TensorSource, complete
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.families.parameters import Parameter, all_parameters
from megatron_arpo.weights.aside import written_aside
from megatron_arpo.weights.block_copy import Placement, write_tensors
from megatron_arpo.weights.hf_files import copy_hf_files
from megatron_arpo.weights.hf_folder import dtype_of_most, set_dtype
from megatron_arpo.weights.lazy_tensor import LazyTensor, num_bytes

_MEGATRON_METADATA = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
_COMMON_STATE = {"content_metadata": {"singleton_local_shards": False}}
_MOST_FILES = 512
"""All are open at the same time."""
_LINEAR = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
_EXPERT_LINEAR = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")


@dataclass(frozen=True, slots=True)
class _Item:
    """A chunk of a key's tensor: a parameter of one layer, stacked with those of the others."""

    key: str
    offsets: tuple[int, ...]
    tensor: LazyTensor

    @property
    def sizes(self) -> tuple[int, ...]:
        return (1,) * (len(self.offsets) - len(self.tensor.shape)) + tuple(self.tensor.shape)


def convert_to_megatron(
    source: TensorSource, target: Path, *, workers: int, max_file_bytes: int, dtype: torch.dtype | None
) -> tuple[int, int]:
    """Fills `target`, which must not exist, with weights/ and hf/ as a run's checkpoints have them; number of tensors and bytes
    written. Raises ValueError where the source is not whole, a key would have two dtypes, or the disk has no room."""
    tensors = complete(source, dtype)
    architecture = source.architecture
    items = [_item(one, fused(one, tensors, architecture), architecture) for one in all_parameters(architecture)]
    entries = _entries(items, source)
    total = sum(num_bytes(item.tensor) for item in items)
    with written_aside(target, total) as aside:
        weights = aside / "weights"
        weights.mkdir()
        (aside / "hf").mkdir()
        copy_hf_files(source.hf_folder, aside / "hf")
        set_dtype(aside / "hf/config.json", dtype_of_most(tensors))
        states = _extra_states(architecture)
        placements, results = _lay_out(weights, items, states, _num_files(len(items), workers, -(-total // max_file_bytes)))
        write_tensors(placements, workers)
        FileSystemWriter(weights).finish(Metadata(entries | {key: BytesStorageMetadata() for key in states}), [results])
        torch.save(_COMMON_STATE, weights / "common.pt")
        (weights / "metadata.json").write_text(json.dumps(_MEGATRON_METADATA))
    return len(items), total


def _num_files(num_items: int, workers: int, for_size: int) -> int:
    return min(num_items, _MOST_FILES, max(workers, for_size))


def _item(parameter: Parameter, tensor: LazyTensor, architecture: Architecture) -> _Item:
    zeros = (0,) * len(tensor.shape)
    if parameter.layer is None:
        return _Item(parameter.name, zeros, tensor)
    lead = (parameter.layer,) if parameter.expert is None else (parameter.layer, parameter.expert)
    return _Item(LAYERS + key_name(parameter.name, architecture.experts is not None), (*lead, *zeros), tensor)


def _entries(items: Sequence[_Item], source: TensorSource) -> dict[str, TensorStorageMetadata]:
    found: dict[str, TensorStorageMetadata] = {}
    for item in items:
        chunk = ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes))
        if item.key not in found:
            found[item.key] = TensorStorageMetadata(TensorProperties(item.tensor.dtype), chunk.sizes, [])
        entry = found[item.key]
        if entry.properties.dtype != item.tensor.dtype:
            raise ValueError(
                f"{source.folder}: {item.key} is {entry.properties.dtype} in one layer and {item.tensor.dtype} in another, "
                f"which a Megatron checkpoint can't keep; add --dtype"
            )
        entry.chunks.append(chunk)
        entry.size = torch.Size(max(size, start + length) for size, start, length in zip(entry.size, item.offsets, item.sizes, strict=True))
    return found


def _extra_states(architecture: Architecture) -> list[str]:
    """Keys of the states that Megatron's layers ask for beside their weights, all empty here; norms have one where they are
    Transformer Engine's."""
    layers = architecture.num_layers
    names = [name for name in _LINEAR if not (architecture.experts and name.startswith("mlp."))]
    if architecture.qk_norm:
        names += ["self_attention.q_layernorm", "self_attention.k_layernorm"]
    if architecture.experts:
        names.append("pre_mlp_layernorm")
    found = [f"{LAYERS}{name}._extra_state/shard_{layer}_{layers}" for layer in range(layers) for name in names]
    if architecture.experts:
        experts = architecture.experts.num_experts
        found += [
            f"{LAYERS}{name}._extra_state/shard_{layer}.{expert}_{layers}.{experts}"
            for layer in range(layers)
            for expert in range(experts)
            for name in _EXPERT_LINEAR
        ]
    return [*found, "decoder.final_layernorm._extra_state/shard_0_1"]


def _lay_out(folder: Path, items: Sequence[_Item], states: Sequence[str], num_files: int) -> tuple[list[Placement], list[WriteResult]]:
    """Makes the files with everything but the tensors' bytes, each item in the file that is least full by then."""
    paths = [folder / f"__0_{index}.distcp" for index in range(num_files)]
    files = [open(path, "wb") for path in paths]  # noqa: SIM115 closed below
    placements, results = [], []
    try:
        buffer = io.BytesIO()
        torch.save([None], buffer)
        empty = buffer.getvalue()
        for key in states:
            results.append(_result(MetadataIndex(key), paths[0], files[0].tell(), len(empty)))
            files[0].write(empty)
        for item in items:
            index = min(range(num_files), key=lambda one: files[one].tell())
            file, start = files[index], files[index].tell()
            head, tail = _container(item.sizes, item.tensor.dtype)
            file.write(head)
            placements.append(Placement(paths[index], file.tell(), item.tensor))
            file.seek(num_bytes(item.tensor), io.SEEK_CUR)
            file.write(tail)
            results.append(_result(MetadataIndex(item.key, torch.Size(item.offsets)), paths[index], start, file.tell() - start))
    finally:
        for file in files:
            file.close()
    return placements, results


def _result(index: MetadataIndex, path: Path, offset: int, length: int) -> WriteResult:
    return WriteResult(index=index, size_in_bytes=length, storage_data=_StorageInfo(path.name, offset, length))


@lru_cache(maxsize=256)
def _container(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What torch.save writes before and behind the bytes of a tensor. The checksum of those stays zero; torch does not check it."""
    sink = _Sink()
    with torch.serialization.skip_data():
        torch.save(torch.empty(sizes, dtype=dtype), sink)  # memory that is reserved and never touched
    head, tail = sink.parts
    if sink.skipped_bytes != math.prod(sizes) * dtype.itemsize:
        raise RuntimeError(f"PyTorch {torch.__version__} lays out the files of torch.save in a way that is not known here")
    return bytes(head), bytes(tail)


class _Sink(io.RawIOBase):
    """Keeps what is written before and behind the one place that is skipped."""

    def __init__(self) -> None:
        self.parts = [bytearray()]
        self.skipped_bytes = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.parts[-1] += data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        skipped = offset if whence == io.SEEK_CUR else offset - self.tell()
        if skipped:
            self.skipped_bytes += skipped
            self.parts.append(bytearray())
        return self.tell()

    def tell(self) -> int:
        return sum(map(len, self.parts)) + self.skipped_bytes
