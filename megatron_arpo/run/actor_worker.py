"""One rank of the Megatron actor, as a plain class; run/placement.py wraps it in a Ray actor.

Every method but `open_store` is a collective: the driver calls it on all ranks. Rows arrive for all data-parallel ranks and
each rank picks its own.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron_arpo.actor import checkpoint, layout
from megatron_arpo.actor.device import current_device, prepare
from megatron_arpo.actor.kernels import layer_implementation
from megatron_arpo.actor.model import TORCH_DTYPES, build_model, transformer_config, unwrap_all
from megatron_arpo.actor.policy import policy_step
from megatron_arpo.actor.reference import ReferencePolicy
from megatron_arpo.actor.sums import Sums
from megatron_arpo.actor.target_logprobs import LogitSettings
from megatron_arpo.actor.update import Updater
from megatron_arpo.batch.flat import pack_sequences
from megatron_arpo.batch.padding import FILLER
from megatron_arpo.config.actor import ActorSettings
from megatron_arpo.config.algorithm import LossSettings
from megatron_arpo.config.model import ModelSettings
from megatron_arpo.families.architecture import read_architecture
from megatron_arpo.types import PackedRow
from megatron_arpo.weights.megatron import load_hf_weights
from megatron_arpo.weights.safetensors_folder import tensor_reader
from megatron_arpo.weights.sender import SendsWeights, WeightSender


class ActorWorker(SendsWeights):
    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        warnings.filterwarnings("ignore", module="megatron")
        logging.getLogger("megatron.core").setLevel(logging.ERROR)

    def host(self) -> str:
        """Address of this rank's machine, as the other ranks reach it."""
        import ray

        return ray.util.get_node_ip_address()

    def open_store(self, host: str) -> int:
        """Rank 0 opens the rendezvous on a free port of `host` and returns it."""
        self._store = torch.distributed.TCPStore(host, 0, self._world_size, is_master=True, wait_for_workers=False)
        return self._store.port

    def setup(
        self, host: str, port: int, model: ModelSettings, actor: ActorSettings, num_updates: int, seed: int, with_reference: bool
    ) -> int:
        """Joins the process group and builds model and optimizer from the Hugging Face folder, and keeps a copy of its weights as
        the reference policy where asked for. Returns this process's pid."""
        prepare()
        torch.set_num_threads(actor.num_threads)
        if self._rank:
            self._store = torch.distributed.TCPStore(host, port, self._world_size, is_master=False)
        layout.initialize(actor.layout, self._store, self._rank, self._world_size, seed)
        self._architecture = read_architecture(model.path)
        self._max_row_tokens, self._row_multiple = actor.max_row_tokens, actor.layout.micro_batch_multiple
        config = transformer_config(self._architecture, TORCH_DTYPES[model.dtype], actor)
        chunks = build_model(config, self._architecture, layer_implementation(actor))
        load_hf_weights(unwrap_all(chunks), self._architecture, tensor_reader(model.path))
        logits = LogitSettings(
            vocab_size=self._architecture.vocab_size,
            chunk_tokens=actor.logits_chunk_tokens,
            sequence_parallel=actor.layout.sequence_parallel,
        )
        self._updater = Updater(chunks, config, logits, actor.optimizer, num_updates)
        self._reference = ReferencePolicy(self._updater.chunks) if with_reference else None
        self.offer_weights(WeightSender(unwrap_all(self._updater.chunks), self._architecture), self._rank, current_device())
        return os.getpid()

    def policy_step(self, mini_batches: Sequence[Sequence[Sequence[PackedRow]]], loss: LossSettings, temperature: float) -> list[Sums]:
        """`mini_batches[i][d]` are the rows of mini-batch i for data-parallel rank d. Empty dicts off the reporting ranks."""
        mine = [ranks[parallel_state.get_data_parallel_rank()] for ranks in mini_batches]
        sums = policy_step(self._updater, self._reference, mine, loss, temperature)
        return sums if layout.reports_results() else [{} for _ in sums]

    def sft_step(self, rows: Sequence[Sequence[PackedRow]]) -> Sums:
        """`rows[d]` are the rows for data-parallel rank d."""
        sums = self._updater.sft_step(rows[parallel_state.get_data_parallel_rank()])
        return sums if layout.reports_results() else {}

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of token_ids[1:] of each sequence at temperature 1; an empty list off the reporting ranks."""
        rows = pack_sequences([(ids, [1] * len(ids)) for ids in sequences], 1.0, self._max_row_tokens)
        rows += [FILLER] * (-len(rows) % self._row_multiple)
        tensors = self._updater.tensors(rows)
        found = self._updater.logprobs(tensors, temperature=1.0)
        if not found:
            return []
        whole = []
        for row, (logprobs_N, _) in zip(tensors, found, strict=True):
            targets = torch.zeros(row.num_targets, device=logprobs_N.device)
            targets[row.target_index_N] = logprobs_N
            torch.distributed.all_reduce(targets, group=parallel_state.get_context_parallel_group())
            whole.append(targets)
        if not layout.reports_results():
            return []
        lengths = [len(ids) - 1 for ids in sequences]
        return [scores.tolist() for scores in torch.cat(whole).split(lengths)]

    def sync_store(self) -> tuple[str, int] | None:
        """Where rank 0 keeps its store open, for other process groups to meet; None on the others."""
        return None if self._rank else (self.host(), self._store.port)

    def save(self, folder: Path) -> None:
        checkpoint.save(self._updater, folder)

    def load(self, folder: Path) -> None:
        checkpoint.load(self._updater, folder)
