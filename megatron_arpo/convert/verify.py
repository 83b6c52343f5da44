"""Two checkpoints of any kinds, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from megatron_arpo.convert.compare import largest_difference
from megatron_arpo.convert.source import EMBEDDING, OUTPUT, TensorSource, expected_shapes
from megatron_arpo.weights.lazy_tensor import CastTensor, LazyTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`problems` has a line for every tensor that is not the same on both sides."""

    num_equal: int
    problems: Sequence[str]


def compare(one: TensorSource, other: TensorSource, *, workers: int, dtype: torch.dtype | None) -> Comparison:
    """By bytes; where `dtype` is given, after a cast of both. Tied output weights count as the embedding where one side leaves
    them out."""
    ours, theirs = _tensors(one, other, dtype), _tensors(other, one, dtype)
    names = list(dict.fromkeys([*ours, *theirs]))
    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(_problem_between(one, other, ours, theirs), names))
    problems = [problem for problem in found if problem is not None]
    for name in dict.fromkeys([*expected_shapes(one.architecture), *expected_shapes(other.architecture)]):
        if name not in ours and name not in theirs:
            problems.append(f"{name}: missing in both")
    return Comparison(num_equal=len(names) - len(problems), problems=problems)


def _tensors(source: TensorSource, other: TensorSource, dtype: torch.dtype | None) -> dict[str, LazyTensor]:
    found = dict(source.tensors)
    if source.architecture.tied_embeddings and OUTPUT in other.tensors and EMBEDDING in found:
        found.setdefault(OUTPUT, found[EMBEDDING])
    return {name: tensor if dtype in (None, tensor.dtype) else CastTensor(tensor, dtype) for name, tensor in found.items()}


def _problem_between(
    one: TensorSource, other: TensorSource, ours: dict[str, LazyTensor], theirs: dict[str, LazyTensor]
) -> Callable[[str], str | None]:
    def problem(name: str) -> str | None:
        if name not in ours:
            return f"{name}: missing in {one.folder}"
        if name not in theirs:
            return f"{name}: missing in {other.folder}"
        left, right = ours[name], theirs[name]
        if left.shape != right.shape:
            return f"{name}: shapes {left.shape} and {right.shape}"
        difference = largest_difference(left, right)
        if difference is None:
            return None
        dtypes = "" if left.dtype == right.dtype else f", {left.dtype} and {right.dtype}"
        return f"{name}: differs by up to {difference:.3g}{dtypes}"

    return problem
