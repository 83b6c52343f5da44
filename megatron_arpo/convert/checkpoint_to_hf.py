"""A checkpoint of a run, in whatever layout it was written -> a Hugging Face folder, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def convert_checkpoint(source: Path, target: Path) -> None:
    """`source` is a checkpoints/step_* folder, or a run folder, whose newest checkpoint is taken. Raises ValueError where the
    source is no checkpoint or the target exists."""
    source = _checkpoint_of(source)
    if target.exists():
        raise ValueError(f"{target}: already there; give a new folder or remove it")

    import torch

    from megatron_arpo.actor import layout
    from megatron_arpo.actor.checkpoint import load_model_only
    from megatron_arpo.actor.device import prepare
    from megatron_arpo.actor.model import build_model, transformer_config, unwrap_all
    from megatron_arpo.config.actor import ActorSettings, LayoutSettings
    from megatron_arpo.families.architecture import read_architecture
    from megatron_arpo.weights.hf_folder import copy_hf_files, write_hf_folder
    from megatron_arpo.weights.megatron import gather_hf_weights

    prepare()
    layout.initialize(LayoutSettings(), torch.distributed.HashStore(), rank=0, world_size=1, seed=0)
    try:
        architecture = read_architecture(source / "hf")
        dtype = _dtype_of(source)
        config = transformer_config(architecture, dtype, ActorSettings(transformer="local"))
        chunks = build_model(config, architecture, "local")
        load_model_only(chunks, source / "weights")
        tensors = {one.name: one.tensor for one in gather_hf_weights(unwrap_all(chunks), architecture)}
        write_hf_folder(target, tensors, lambda aside: copy_hf_files(source / "hf", aside))
    finally:
        torch.distributed.destroy_process_group()


def _checkpoint_of(source: Path) -> Path:
    if (source / "checkpoints").is_dir():
        found = sorted((source / "checkpoints").glob("step_*"))
        if not found:
            raise ValueError(f"{source}: the run has no finished checkpoint yet")
        return found[-1]
    if not (source / "state.json").exists() or not (source / "weights").is_dir():
        raise ValueError(f"{source}: not a checkpoint; give a run folder or one of its checkpoints/step_* folders")
    return source


def _dtype_of(source: Path) -> Any:
    """The torch.dtype the weights were trained in, read from the checkpoint itself."""
    from torch.distributed.checkpoint import FileSystemReader

    entries = FileSystemReader(str(source / "weights")).read_metadata().state_dict_metadata
    name = next(name for name in entries if name.endswith("final_layernorm.weight") and not name.startswith("optimizer."))
    return entries[name].properties.dtype
