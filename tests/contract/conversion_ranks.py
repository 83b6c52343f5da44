"""What every rank of tests/contract/test_conversion.py does: loads converted checkpoints into the actor, and leaves behind what verl
would have saved of the same models."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megatron_arpo.actor import layout
from megatron_arpo.actor.checkpoint import _use_in_process_results
from megatron_arpo.config.actor import ActorSettings
from tests.contract.actor_ranks import SGD, Actor, join_ranks, leave_ranks, scores


def run_conversion_rank(rank: int, world_size: int, job_path: Path, log_path: Path) -> None:
    job = join_ranks(rank, world_size, job_path, log_path)
    found: dict = {"reports": layout.reports_results(), "scores": {}}
    for family, model in job["models"].items():
        actor = Actor(Path(model), ActorSettings(layout=job["layout"], optimizer=SGD))
        actor.load(factor=0.0)
        load(actor, Path(job["converted"][family]))
        found["scores"][family] = scores(actor)
        save_as_verl(actor, Path(job["verl"]) / family, rank)
        save_as_verl_did(actor, Path(job["verl_before"]) / family)
        save_as_fsdp(Path(model), Path(job["fsdp"]) / family, rank, world_size)
    leave_ranks(rank, job_path, found)


def load(actor: Actor, folder: Path) -> None:
    """With megatron-core's own loader and the keys that the model asks for."""
    state = {str(index): model.sharded_state_dict() for index, model in enumerate(actor.models)}
    loaded = dist_checkpointing.load(state, str(folder))
    for index, model in enumerate(actor.models):
        model.load_state_dict(loaded[str(index)])


def save_as_verl(actor: Actor, folder: Path, rank: int) -> None:
    """dist_ckpt/, as verl writes it today."""
    target = folder / "dist_ckpt"
    if rank == 0:
        target.mkdir(parents=True)
    torch.distributed.barrier()
    models = actor.models
    names = ["model"] if len(models) == 1 else [f"model{index}" for index in range(len(models))]
    state = {name: model.sharded_state_dict() for name, model in zip(names, models, strict=True)}
    _use_in_process_results()
    dist_checkpointing.save(state, str(target))


def save_as_verl_did(actor: Actor, folder: Path) -> None:
    """model/mp_rank_*/model.pt, as verl wrote it in the time of the published code: of the first data-parallel rank alone."""
    if parallel_state.get_data_parallel_rank() == 0:
        name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
        if parallel_state.get_expert_model_parallel_world_size() > 1:
            name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
        target = folder / "model" / name
        target.mkdir(parents=True)
        torch.save([model.state_dict() for model in actor.models], target / "model.pt")
    torch.distributed.barrier()


def save_as_fsdp(model: Path, folder: Path, rank: int, world_size: int) -> None:
    """DTensors, the vocabulary's rows unevenly; four ranks as two replicas of two."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(parents=True)
    if world_size == 4:
        mesh, placements = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp")), [Replicate(), Shard(0)]
    else:
        mesh, placements = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",)), [Shard(0)]
    state = {name: distribute_tensor(tensor, mesh, placements) for name, tensor in load_file(model / "model.safetensors").items()}
    torch.save(state, folder / f"model_world_size_{world_size}_rank_{rank}.pt")
    torch.distributed.barrier()
