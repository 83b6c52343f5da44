"""Reading the tensors of a Hugging Face folder by name, whatever its number of shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch


def tensor_reader(model_path: Path) -> Callable[[str], torch.Tensor]:
    """A function from tensor name to tensor, read from memory-mapped shards when asked for. Raises ValueError naming the
    file where shards are missing or damaged, and the tensor where the folder lacks one."""
    from safetensors import SafetensorError, safe_open

    index_path = model_path / "model.safetensors.index.json"
    try:
        if index_path.exists():
            files = sorted(set(json.loads(index_path.read_text())["weight_map"].values()))
        else:
            files = ["model.safetensors"]
        shards = {file: safe_open(model_path / file, framework="pt") for file in files}
    except FileNotFoundError as error:
        raise ValueError(f"model.path={model_path}: weight file {error.filename or files[0]} is missing") from error
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise ValueError(f"model.path={model_path}: cannot read the weights ({error}); copy the folder again") from error
    where = {name: shard for shard in shards.values() for name in shard.keys()}  # noqa: SIM118 not iterable itself

    def read(name: str) -> torch.Tensor:
        if name not in where:
            raise ValueError(f"model.path={model_path}: tensor {name} is missing; the weights don't match config.json")
        return where[name].get_tensor(name)

    return read
