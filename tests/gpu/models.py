"""Models with equal weights for the checks that compare two of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from megatron_arpo.actor.model import unwrap_all
from megatron_arpo.actor.update import Updater
from megatron_arpo.bench.actor import build_updater
from megatron_arpo.config.actor import ActorSettings
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.types import PackedRow
from tests.gathered import gather_hf_weights

Weights = dict[str, torch.Tensor]


def random_weights(architecture: Architecture, dtype: torch.dtype) -> Weights:
    """Under their Hugging Face names, on the host; the norms' weights are not all one."""
    updater = build_updater(architecture, dtype, ActorSettings(transformer="local", optimizer={"kind": "sgd"}))
    generator = torch.Generator().manual_seed(3)
    found = {}
    for one in gather_hf_weights(unwrap_all(updater.chunks), architecture):
        tensor = one.tensor.to("cpu", copy=True)
        if tensor.dim() == 1:
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator).to(dtype)
        found[one.name] = tensor
    free(updater)
    return found


def with_weights(architecture: Architecture, dtype: torch.dtype, weights: Weights, **actor: object) -> Updater:
    return build_updater(architecture, dtype, ActorSettings.model_validate(actor), weights.__getitem__)


def free(updater: Updater) -> None:
    """Gives the device memory back though the caller's variable still names the updater."""
    updater.__dict__.clear()
    gc.collect()
    torch.cuda.empty_cache()


def logprobs_of(updater: Updater, rows: Sequence[PackedRow]) -> torch.Tensor:
    """Of every target, in order, on the host."""
    return torch.cat([logprobs_N.cpu() for logprobs_N, _ in updater.logprobs(updater.tensors(rows), temperature=1.0)])


def losses_of(updater: Updater, rows: Sequence[PackedRow], num_steps: int) -> list[float]:
    return [updater.sft_step(rows)["loss"] for _ in range(num_steps)]


def largest_relative(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))


def median_seconds(action: Callable[[], object], num_times: int = 5, num_warm_up: int = 2) -> float:
    def once() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        action()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    for _ in range(num_warm_up):
        action()
    return statistics.median(once() for _ in range(num_times))
