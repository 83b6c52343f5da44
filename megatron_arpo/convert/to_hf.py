"""A checkpoint of any kind -> a Hugging Face folder that transformers and vLLM load as it is."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_arpo.convert.source import TensorSource, complete
from megatron_arpo.weights.hf_folder import write_hf_folder
from megatron_arpo.weights.lazy_tensor import num_bytes


def convert_to_hf(source: TensorSource, target: Path, *, workers: int, max_shard_bytes: int, dtype: torch.dtype | None) -> tuple[int, int]:
    """Number of tensors and bytes written; `target` must not exist. Raises ValueError where the source is not whole or the disk has
    no room."""
    tensors = complete(source, dtype)
    write_hf_folder(target, tensors, source.hf_folder, max_shard_bytes=max_shard_bytes, workers=workers)
    return len(tensors), sum(map(num_bytes, tensors.values()))
