"""The actor's weights of this moment -> a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from megatron_arpo.engine.weight_buffer import mapped, places_of, tensor_at
from megatron_arpo.run.weight_sync import WeightSync
from megatron_arpo.weights.hf_folder import write_hf_folder
from megatron_arpo.weights.lazy_tensor import HeldTensor


def export_hf(sync: WeightSync, model_path: Path, target: Path) -> None:
    """Config and tokenizer come from `model_path`."""
    path, manifest = sync.write(version=0)
    try:
        with mapped(path) as buffer:
            write_hf_folder(target, {place.name: HeldTensor(tensor_at(buffer, place)) for place in places_of(manifest)}, model_path)
    finally:
        path.unlink()
