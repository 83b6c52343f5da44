"""A Megatron actor of random weights in this process, for benches."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from megatron_arpo.actor import layout
from megatron_arpo.actor.device import prepare
from megatron_arpo.actor.kernels import layer_implementation
from megatron_arpo.actor.model import build_model, transformer_config, unwrap_all
from megatron_arpo.actor.policy import policy_step
from megatron_arpo.actor.target_logprobs import LogitSettings
from megatron_arpo.actor.update import Updater
from megatron_arpo.config.actor import ActorSettings, LayoutSettings
from megatron_arpo.config.algorithm import LossSettings
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.types import PackedRow
from megatron_arpo.weights.megatron import load_hf_weights


def start_single_rank() -> None:
    """Joins the one process group that a process may have."""
    prepare()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    layout.initialize(LayoutSettings(), torch.distributed.HashStore(), rank=0, world_size=1, seed=0)


def build_updater(
    architecture: Architecture, dtype: torch.dtype, actor: ActorSettings, read: Callable[[str], torch.Tensor] | None = None
) -> Updater:
    """A model of random weights, or of those that `read` gives for a Hugging Face name, and its optimizer."""
    config = transformer_config(architecture, dtype, actor)
    chunks = build_model(config, architecture, layer_implementation(actor))
    if read is not None:
        load_hf_weights(unwrap_all(chunks), architecture, read)
    logits = LogitSettings(vocab_size=architecture.vocab_size, chunk_tokens=actor.logits_chunk_tokens, sequence_parallel=False)
    return Updater(chunks, config, logits, actor.optimizer, num_updates=1_000_000)


class BenchActor:
    """`with BenchActor(architecture, dtype) as actor: actor.update(rows)`; one rank, on all cores of this process."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, actor: ActorSettings | None = None) -> None:
        self._architecture, self._dtype, self._settings = architecture, dtype, actor or ActorSettings()

    def __enter__(self) -> BenchActor:
        start_single_rank()
        self._updater = build_updater(self._architecture, self._dtype, self._settings)
        return self

    def __exit__(self, *_error: object) -> None:
        torch.distributed.destroy_process_group()

    def update(self, rows: Sequence[PackedRow]) -> None:
        """One optimizer update of the policy loss."""
        policy_step(self._updater, None, [rows], LossSettings(), temperature=1.0)
        torch.cuda.synchronize()
