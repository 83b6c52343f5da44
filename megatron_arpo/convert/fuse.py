"""Hugging Face tensors as the runs of rows of a fused Megatron tensor, and back, by the one table in families/names.py.

The table acts on tensors. Given the numbers of rows in place of rows it tells where each row goes, once for a kind of parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

from megatron_arpo.families.architecture import Architecture
from megatron_arpo.families.names import to_hf, to_megatron
from megatron_arpo.families.parameters import Parameter, hf_shapes
from megatron_arpo.weights.lazy_tensor import JoinedTensor, LazyTensor, RowRun


def fused(parameter: Parameter, tensors: Mapping[str, LazyTensor], architecture: Architecture) -> LazyTensor:
    """The whole Megatron tensor, vocabulary padded for one tensor-parallel rank, of whole Hugging Face tensors by name."""
    parts = [tensors[name] for name in parameter.hf_names]
    if len({part.dtype for part in parts}) > 1:
        found = ", ".join(f"{name} is {part.dtype}" for name, part in zip(parameter.hf_names, parts, strict=True))
        raise ValueError(f"{found}: Megatron keeps them in one tensor; add --dtype")
    runs = _fused_runs(parameter.name, architecture)
    if len(runs) == 1:
        return parts[0]
    num_rows = sum(count for _, _, count in runs)
    rows = [RowRun(None if part is None else parts[part], start, count) for part, start, count in runs]
    return JoinedTensor(parts[0].dtype, (num_rows, *parts[0].shape[1:]), rows)


def split(parameter: Parameter, whole: LazyTensor, architecture: Architecture) -> dict[str, LazyTensor]:
    """Inverse of `fused`: Hugging Face tensors by name; `whole` may have any number of padding rows."""
    found: dict[str, LazyTensor] = {}
    for name, runs in zip(parameter.hf_names, _split_runs(parameter.name, architecture), strict=True):
        num_rows = sum(count for _, count in runs)
        if len(runs) == 1 and num_rows == whole.shape[0]:
            found[name] = whole
            continue
        found[name] = JoinedTensor(whole.dtype, (num_rows, *whole.shape[1:]), [RowRun(whole, start, count) for start, count in runs])
    return found


def megatron_shape(parameter: Parameter, architecture: Architecture) -> tuple[int, ...]:
    """Of the whole tensor; the vocabulary without padding."""
    shapes = hf_shapes(parameter.name, architecture)
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@lru_cache(maxsize=64)
def _fused_runs(name: str, architecture: Architecture) -> tuple[tuple[int | None, int, int], ...]:
    """(part, first row in it, number of rows) in the order of the Megatron tensor; part None is padding."""
    sizes = [shape[0] for shape in hf_shapes(name, architecture)]
    gap = max(sizes) + 2  # numbers of different parts never follow each other, and 0 is padding's
    parts = {str(part): torch.arange(size)[:, None] + 1 + part * gap for part, size in enumerate(sizes)}
    numbers = to_megatron(name, parts, architecture, tp=1)[:, 0]
    used = numbers[numbers > 0]
    runs: list[tuple[int | None, int, int]] = [((first - 1) // gap, (first - 1) % gap, count) for first, count in runs_of(used)]
    if padding := len(numbers) - len(used):
        runs.append((None, 0, padding))
    return tuple(runs)


@lru_cache(maxsize=64)
def _split_runs(name: str, architecture: Architecture) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each Hugging Face tensor (first row in the Megatron tensor, number of rows)."""
    shapes = hf_shapes(name, architecture)
    numbers = torch.arange(sum(shape[0] for shape in shapes))[:, None]
    names = tuple(str(part) for part in range(len(shapes)))
    return tuple(tuple(runs_of(part[:, 0])) for part in to_hf(name, names, numbers, architecture).values())


def runs_of(numbers: torch.Tensor) -> list[tuple[int, int]]:
    """(first, length) of every run of consecutive numbers."""
    breaks = (torch.diff(numbers) != 1).nonzero()[:, 0] + 1
    starts = [0, *breaks.tolist()]
    ends = [*starts[1:], len(numbers)]
    return [(int(numbers[start]), end - start) for start, end in zip(starts, ends, strict=True)]
