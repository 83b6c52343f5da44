"""Model, optimizer and schedule to and from a Megatron dist-checkpoint that any layout can load.

Callers write to a folder aside and rename it (run/folder.py); this file only fills or reads one.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_arpo.actor.model import unwrap_all
from megatron_arpo.actor.offload import drop_classes, hybrid_optimizers, let_steps_advance
from megatron_arpo.actor.update import Updater

_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def _model_state(chunks: Sequence[torch.nn.Module], metadata: dict[str, Any]) -> dict[str, Any]:
    """Keys name tensors of the whole model, whatever the layout; the chunk's number only keeps them apart here."""
    return {str(index): model.sharded_state_dict(metadata=metadata) for index, model in enumerate(unwrap_all(chunks))}


def _sharded_state(updater: Updater, is_loading: bool) -> dict[str, Any]:
    metadata = {**_METADATA, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    model_state = _model_state(updater.chunks, metadata)
    return {
        "model": model_state,
        "optimizer": updater.optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata),
    }


def save(updater: Updater, folder: Path) -> None:
    """Collective over all ranks; `folder` must exist and be empty. Raises OSError where the disk is full."""
    state = _sharded_state(updater, is_loading=False)
    drop_classes(state["optimizer"])
    state["schedule"] = updater.schedule.state_dict()
    _use_in_process_results()
    strategy = dist_checkpointing.serialization.get_default_save_sharded_strategy()
    dist_checkpointing.save(state, str(folder), strategy, content_metadata=_METADATA)


def _use_in_process_results() -> None:
    """megatron-core 0.16.1 hands write results over through a multiprocessing.Manager, a server process that takes seconds to
    start and outlives a killed rank. A synchronous save puts and gets in one process, where a plain queue serves."""
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def load(updater: Updater, folder: Path) -> None:
    """Collective over all ranks, in any layout. Raises RuntimeError where the optimizer's copy of the weights turns out not to
    be the model's."""
    state = _sharded_state(updater, is_loading=True)
    loaded = _load(state, folder)
    _load_model(updater.chunks, loaded["model"])
    before = _fingerprints(updater.chunks)
    with torch.no_grad():
        updater.optimizer.load_state_dict(loaded["optimizer"])
    for hybrid in hybrid_optimizers(updater.optimizer):
        let_steps_advance(hybrid)
    wrong = [name for name, value in _fingerprints(updater.chunks).items() if value != before[name]]
    if wrong:
        raise RuntimeError(f"{folder}: the optimizer state of {wrong[0]} and {len(wrong) - 1} more parameters belongs to other weights")
    updater.schedule.num_steps = 0  # its load_state_dict counts on from there
    updater.schedule.load_state_dict(loaded["schedule"])


def _fingerprints(chunks: Sequence[torch.nn.Module]) -> dict[str, float]:
    return {
        f"{index} {name}": float(parameter.detach().double().sum())
        for index, model in enumerate(unwrap_all(chunks))
        for name, parameter in model.named_parameters()
    }


def _load_model(chunks: Sequence[torch.nn.Module], loaded: dict[str, Any]) -> None:
    for index, model in enumerate(unwrap_all(chunks)):
        model.load_state_dict(loaded[str(index)])


def _load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    strategy = dist_checkpointing.serialization.get_default_load_sharded_strategy(str(folder))
    return dist_checkpointing.load(state, str(folder), strategy)
