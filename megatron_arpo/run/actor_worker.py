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
from megatron_arpo.actor.device import prepare
from megatron_arpo.actor.forward import row_tensors
from megatron_arpo.actor.model import TORCH_DTYPES, build_model, transformer_config, unwrap
from megatron_arpo.actor.sums import Sums
from megatron_arpo.actor.update import Updater
from megatron_arpo.batch.flat import pack_sequences
from megatron_arpo.config.actor import ActorSettings
from megatron_arpo.config.algorithm import LossSettings
from megatron_arpo.config.model import ModelSettings
from megatron_arpo.engine.weight_buffer import TensorPlace, checksum, mapped, tensor_at
from megatron_arpo.families.architecture import read_architecture
from megatron_arpo.types import PackedRow, ParallelLayout
from megatron_arpo.weights.megatron import gather_hf_weights, load_hf_weights
from megatron_arpo.weights.safetensors_folder import tensor_reader


class ActorWorker:
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

    def setup(self, host: str, port: int, model: ModelSettings, actor: ActorSettings, num_updates: int, seed: int) -> int:
        """Joins the process group and builds model and optimizer from the Hugging Face folder. Returns this process's pid."""
        prepare()
        torch.set_num_threads(actor.num_threads)
        if self._rank:
            self._store = torch.distributed.TCPStore(host, port, self._world_size, is_master=False)
        sizes = ParallelLayout(tp=actor.layout.tp, pp=actor.layout.pp)
        layout.initialize(sizes, self._store, self._rank, self._world_size, seed)
        self._architecture = read_architecture(model.path)
        self._max_row_tokens = actor.max_row_tokens
        config = transformer_config(self._architecture, TORCH_DTYPES[model.dtype], sizes.tp, sizes.pp)
        built = build_model(config, self._architecture)
        load_hf_weights(unwrap(built), self._architecture, tensor_reader(model.path))
        self._updater = Updater(built, config, self._architecture.vocab_size, actor.optimizer, num_updates)
        return os.getpid()

    def policy_step(self, mini_batches: Sequence[Sequence[Sequence[PackedRow]]], loss: LossSettings, temperature: float) -> list[Sums]:
        """`mini_batches[i][d]` are the rows of mini-batch i for data-parallel rank d. Empty dicts off the reporting ranks."""
        mine = [ranks[parallel_state.get_data_parallel_rank()] for ranks in mini_batches]
        sums = self._updater.policy_step(mine, loss, temperature)
        return sums if layout.reports_results() else [{} for _ in sums]

    def sft_step(self, rows: Sequence[Sequence[PackedRow]]) -> Sums:
        """`rows[d]` are the rows for data-parallel rank d."""
        sums = self._updater.sft_step(rows[parallel_state.get_data_parallel_rank()])
        return sums if layout.reports_results() else {}

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of token_ids[1:] of each sequence at temperature 1; an empty list off the reporting ranks."""
        rows = pack_sequences([(ids, [1] * len(ids)) for ids in sequences], 1.0, self._max_row_tokens)
        found = self._updater.logprobs([row_tensors(row) for row in rows], temperature=1.0)
        if not found or not layout.reports_results():
            return []
        flat = torch.cat([logprobs for logprobs, _ in found]).tolist()
        scores, start = [], 0
        for ids in sequences:
            scores.append(flat[start : start + len(ids) - 1])
            start += len(ids) - 1
        return scores

    def weight_shapes(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(Hugging Face name, dtype, shape) of this stage's tensors; empty on ranks that don't write weights."""
        gathered = gather_hf_weights(unwrap(self._updater.ddp), self._architecture)
        found = [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in gathered]
        return found if layout.writes_weights() else []

    def write_weights(self, path: Path, places: Sequence[TensorPlace]) -> dict[str, int]:
        """Writes this stage's tensors into the flat file and returns their checksums."""
        where = {place.name: place for place in places}
        checksums: dict[str, int] = {}
        gathered = gather_hf_weights(unwrap(self._updater.ddp), self._architecture)
        if not layout.writes_weights():
            for _ in gathered:  # the gathering is a collective
                pass
            return {}
        with mapped(path) as buffer:
            for name, tensor in gathered:
                tensor_at(buffer, where[name]).copy_(tensor)
                checksums[name] = checksum(tensor)
        return checksums

    def save(self, folder: Path) -> None:
        checkpoint.save(self._updater, folder)

    def load(self, folder: Path) -> None:
        checkpoint.load(self._updater, folder)
