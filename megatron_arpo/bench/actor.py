"""A Megatron actor of random weights in this process, for benches."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from megatron_arpo.actor import layout
from megatron_arpo.actor.device import prepare
from megatron_arpo.actor.kernels import layer_implementation
from megatron_arpo.actor.model import build_model, transformer_config
from megatron_arpo.actor.policy import policy_step
from megatron_arpo.actor.target_logprobs import LogitSettings
from megatron_arpo.actor.update import Updater
from megatron_arpo.config.actor import ActorSettings
from megatron_arpo.config.algorithm import LossSettings
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.types import PackedRow


class BenchActor:
    """`with BenchActor(architecture, dtype) as actor: actor.update(rows)`; one rank, on all cores of this process."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, actor: ActorSettings | None = None) -> None:
        self._architecture, self._dtype, self._settings = architecture, dtype, actor or ActorSettings()

    def __enter__(self) -> BenchActor:
        prepare()
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        layout.initialize(self._settings.layout, torch.distributed.HashStore(), rank=0, world_size=1, seed=0)
        config = transformer_config(self._architecture, self._dtype, self._settings)
        chunks = build_model(config, self._architecture, layer_implementation(self._settings))
        logits = LogitSettings(
            vocab_size=self._architecture.vocab_size, chunk_tokens=self._settings.logits_chunk_tokens, sequence_parallel=False
        )
        self._updater = Updater(chunks, config, logits, self._settings.optimizer, num_updates=1_000_000)
        return self

    def __exit__(self, *_error: object) -> None:
        torch.distributed.destroy_process_group()

    def update(self, rows: Sequence[PackedRow]) -> None:
        """One optimizer update of the policy loss."""
        policy_step(self._updater, None, [rows], LossSettings(), temperature=1.0)
        torch.cuda.synchronize()
