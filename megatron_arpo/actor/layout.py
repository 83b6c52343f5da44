"""Process groups of one actor rank: torch.distributed over the backend of the device, Megatron's parallel_state on top."""

from __future__ import annotations

import datetime

import torch
from megatron.core import parallel_state, tensor_parallel

from megatron_arpo.actor.device import collective_backend
from megatron_arpo.types import ParallelLayout

_TIMEOUT = datetime.timedelta(minutes=10)


def initialize(layout: ParallelLayout, store: torch.distributed.Store, rank: int, world_size: int, seed: int) -> None:
    """Joins the process group of `world_size` ranks through `store` and builds Megatron's groups."""
    torch.distributed.init_process_group(collective_backend(), store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def reports_results() -> bool:
    """True on the one rank of each data-parallel replica that holds the loss: last stage, tensor-parallel rank 0."""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0


def writes_weights() -> bool:
    """True on the one rank of each pipeline stage that writes the stage's weights out."""
    return parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_data_parallel_rank() == 0
