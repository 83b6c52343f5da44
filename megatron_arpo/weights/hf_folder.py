"""Writing a Hugging Face folder that transformers and vLLM load as it is, tensor by tensor, block by block."""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megatron_arpo.weights.aside import written_aside
from megatron_arpo.weights.block_copy import Placement, write_tensors
from megatron_arpo.weights.hf_files import copy_hf_files
from megatron_arpo.weights.lazy_tensor import LazyTensor, num_bytes
from megatron_arpo.weights.safetensors_folder import INDEX_FILE, SINGLE_FILE
from megatron_arpo.weights.safetensors_header import Entry, header

DEFAULT_SHARD_GIB = 5.0


def write_hf_folder(
    target: Path,
    tensors: Mapping[str, LazyTensor],
    config_from: Path,
    *,
    max_shard_bytes: int = int(DEFAULT_SHARD_GIB * (1 << 30)),
    workers: int = 1,
    replace: bool = False,
) -> None:
    """Weights in files of at most `max_shard_bytes` (a larger tensor has its own), config and tokenizer those of the folder
    `config_from`, config.json with the tensors' dtype. Written aside and renamed; with `replace`, `target` may be there. Raises
    ValueError where there is no room."""
    shards = _sharded(tensors, max_shard_bytes)
    total = sum(map(num_bytes, tensors.values()))
    with written_aside(target, total, replace=replace) as aside:
        copy_hf_files(config_from, aside)
        set_dtype(aside / "config.json", dtype_of_most(tensors))
        names = [shard_name(index, len(shards)) for index in range(len(shards))]
        write_index(aside, {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}, total)
        write_tensors([one for name, shard in zip(names, shards, strict=True) for one in _write_header(aside / name, shard)], workers)


def shard_name(index: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Tensor name -> file; nothing to write where all tensors are in one."""
    if len(set(weight_map.values())) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(weight_map)}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _sharded(tensors: Mapping[str, LazyTensor], max_shard_bytes: int) -> Sequence[Mapping[str, LazyTensor]]:
    shards: list[dict[str, LazyTensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + num_bytes(tensor) > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += num_bytes(tensor)
    return shards


def _write_header(path: Path, tensors: Mapping[str, LazyTensor]) -> list[Placement]:
    """Makes the file with its header and full length; what is left to be written. Larger elements first, so that each tensor
    lies on a multiple of its element's size, as its readers want it."""
    entries: list[Entry] = []
    offset = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        entries.append(Entry(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), offset=offset, num_bytes=num_bytes(tensor)))
        offset += num_bytes(tensor)
    head = header(entries)
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(len(head) + offset)
    return [Placement(path, len(head) + entry.offset, tensors[entry.name]) for entry in entries]


def dtype_of_most(tensors: Mapping[str, LazyTensor]) -> torch.dtype:
    """Of most bytes."""
    sizes: collections.Counter = collections.Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += num_bytes(tensor)
    return sizes.most_common(1)[0][0]


def set_dtype(config_path: Path, dtype: torch.dtype) -> None:
    """Under the name that the file uses; older readers know `torch_dtype` alone."""
    values = json.loads(config_path.read_text(encoding="utf-8"))
    name = str(dtype).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if key in values] or ["torch_dtype"]
    if any(values.get(key) != name for key in keys):
        config_path.write_text(json.dumps(values | dict.fromkeys(keys, name), indent=2) + "\n", encoding="utf-8")
