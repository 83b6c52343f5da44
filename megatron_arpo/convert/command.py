"""`megatron-arpo convert`: what its three commands do once the arguments are read."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from megatron_arpo.convert.open_source import open_source
from megatron_arpo.convert.to_hf import convert_to_hf
from megatron_arpo.convert.to_megatron import convert_to_megatron
from megatron_arpo.convert.verify import compare


def convert(
    kind: str, source: Path, target: Path, *, hf_config: Path | None, workers: int, max_shard_gib: float, dtype: str | None
) -> None:
    """`kind` is "to-hf" or "to-megatron". Raises ValueError where the target exists, the source can't be read or has no room."""
    target = Path(os.path.abspath(target))
    if os.path.lexists(target):
        raise ValueError(f"{target}: already there; give a new folder or remove it")
    started = time.perf_counter()
    opened = open_source(source, hf_config)
    cast, max_bytes = _dtype(dtype), int(max_shard_gib * (1 << 30))
    if kind == "to-hf":
        num_tensors, num_bytes = convert_to_hf(opened, target, workers=workers, max_shard_bytes=max_bytes, dtype=cast)
    else:
        num_tensors, num_bytes = convert_to_megatron(opened, target, workers=workers, max_file_bytes=max_bytes, dtype=cast)
    seconds = time.perf_counter() - started
    print(f"{opened.kind} {opened.folder} -> {target}: {num_tensors} tensors, {num_bytes / 1e9:.3f} GB, in {seconds:.3f} s")


def verify(one: Path, other: Path, *, hf_config: Path | None, workers: int, dtype: str | None) -> bool:
    """Prints what differs; True where nothing does."""
    left, right = (open_source(path, hf_config) for path in (one, other))
    found = compare(left, right, workers=workers, dtype=_dtype(dtype))
    for problem in found.problems:
        print(problem)
    print(f"{found.num_equal} tensors equal, {len(found.problems)} not: {left.kind} {left.folder}, {right.kind} {right.folder}")
    return not found.problems


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
