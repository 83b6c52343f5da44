"""Process groups of one actor rank: torch.distributed over the backend of the device, Megatron's parallel_state on top."""

from __future__ import annotations

import datetime
import math

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_arpo.actor.device import collective_backend, on_cuda
from megatron_arpo.batch.context import BLOCKS_PER_RANK
from megatron_arpo.config.actor import LayoutSettings

_TIMEOUT = datetime.timedelta(minutes=10)
MASK_BLOCK_TOKENS = 128
"""Queries and keys of one block of FlexAttention's mask."""


def initialize(layout: LayoutSettings, store: torch.distributed.Store, rank: int, world_size: int, seed: int) -> None:
    """Joins the process group of `world_size` ranks through `store` and builds Megatron's groups."""
    if on_cuda():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.distributed.init_process_group(collective_backend(), store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def slice_multiple(config: TransformerConfig) -> int:
    """What the tokens of a row on one context-parallel rank must be a multiple of: sequence parallelism cuts them evenly, FP8
    products have a least size, and FlexAttention's blocks are whole."""
    multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
    if config.fp8:
        from megatron.core.fp8_utils import get_fp8_align_size

        multiple *= get_fp8_align_size(config.fp8_recipe)
    block = MASK_BLOCK_TOKENS if on_cuda() else 1
    return math.lcm(multiple, block * BLOCKS_PER_RANK if config.context_parallel_size > 1 else block)


def reports_results() -> bool:
    """True on the ranks that hold a part of the loss of their own: last stage, tensor-parallel rank 0."""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
