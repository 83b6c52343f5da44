"""The actor's weights of this moment -> a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from megatron_arpo.engine.weight_buffer import mapped, places_of, tensor_at
from megatron_arpo.run.weight_sync import WeightSync
from megatron_arpo.weights.hf_folder import copy_hf_files, write_hf_folder


def export_hf(sync: WeightSync, model_path: Path, target: Path) -> None:
    """Config and tokenizer come from `model_path`."""
    path, manifest = sync.write(version=0)
    try:
        with mapped(path) as buffer:
            tensors = {place.name: tensor_at(buffer, place).clone() for place in places_of(manifest)}
    finally:
        path.unlink()
    write_hf_folder(target, tensors, lambda aside: copy_hf_files(model_path, aside))
