"""The tensors of a Hugging Face folder by name, whatever its number of shards, without reading them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_arpo.weights.lazy_tensor import StoredTensor, num_bytes, read_whole
from megatron_arpo.weights.safetensors_header import SAFETENSORS_DTYPES

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
_LARGEST_HEADER_BYTES = 100 << 20
"""What the safetensors library takes at most."""


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """By name, from the headers of all shards. Raises ValueError naming the file that is missing, truncated or damaged."""
    found: dict[str, StoredTensor] = {}
    for path in _shards(folder):
        for name, tensor in _read_header(path).items():
            if name in found:
                raise ValueError(f"{path}: tensor {name} is also in {found[name].path.name}; the shards are not of one model")
            found[name] = tensor
    return found


def tensor_reader(model_path: Path) -> Callable[[str], torch.Tensor]:
    """A function from tensor name to tensor, read when asked for. Raises ValueError naming the file where shards are missing
    or damaged, and the tensor where the folder lacks one."""
    try:
        tensors = stored_tensors(model_path)
    except ValueError as error:
        raise ValueError(f"model.path={model_path}: {error}") from error

    def read(name: str) -> torch.Tensor:
        if name not in tensors:
            raise ValueError(f"model.path={model_path}: tensor {name} is missing; the weights don't match config.json")
        return read_whole(tensors[name])

    return read


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if not index.exists():
        return [folder / SINGLE_FILE]
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: damaged ({error!r}); copy the folder again") from error


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with open(path, "rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER_BYTES):
                raise ValueError("its header goes past its end")
            header = json.loads(file.read(length))
        found = {name: _tensor(path, 8 + length, name, entry) for name, entry in header.items() if name != "__metadata__"}
    except FileNotFoundError as error:
        raise ValueError(f"weight file {path} is missing; copy the folder again") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); copy it again") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: cannot read the weights ({error}); the file is truncated or damaged, copy it again") from error
    end = max((tensor.offset + num_bytes(tensor) for tensor in found.values()), default=0)
    if end > size:
        raise ValueError(f"{path}: cannot read the weights (it has {size} of {end} bytes); the file is truncated, copy it again")
    return found


def _tensor(path: Path, start: int, name: str, entry: dict[str, Any]) -> StoredTensor:
    first, last = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if entry["dtype"] not in SAFETENSORS_DTYPES:
        raise ValueError(f"tensor {name} has dtype {entry['dtype']}, use one of {', '.join(SAFETENSORS_DTYPES)}")
    tensor = StoredTensor(path, start + first, SAFETENSORS_DTYPES[entry["dtype"]], shape)
    if last - first != math.prod(shape) * tensor.dtype.itemsize or first < 0:
        raise ValueError(f"tensor {name} of shape {shape} has {last - first} bytes")
    return tensor
