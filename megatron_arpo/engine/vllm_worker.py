"""What runs inside vLLM's own worker processes: taking weights from shared memory through vLLM's layer-wise reload.

Written for vLLM 0.32. Its CPU kernels pre-pack linear layers, so weights can only go in by the layer-wise way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_arpo.engine.weight_buffer import check_buffer, mapped, places_of, tensor_at
from megatron_arpo.types import WeightManifest


class WeightLoader:
    """Mixed into vLLM's worker class (`worker_extension_cls`); reached by collective_rpc with plain types only."""

    def check_weights(self, path: str, manifest: dict[str, Any]) -> str:
        """Returns what is wrong with the buffer, or an empty string. Touches nothing."""
        try:
            with mapped(Path(path)) as buffer:
                check_buffer(buffer, _manifest(manifest))
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def load_weights_from_buffer(self, path: str, manifest: dict[str, Any]) -> int:
        """Replaces the model's weights; returns how many tensors were taken."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.model_runner.model
        places = places_of(_manifest(manifest))
        with mapped(Path(path)) as buffer, torch.device(self.device), torch.no_grad():
            initialize_layerwise_reload(model)
            model.load_weights((place.name, tensor_at(buffer, place)) for place in places)
            finalize_layerwise_reload(model, self.model_config)
            if self.model_config.hf_text_config.tie_word_embeddings:
                # the reload sees only the embedding; an output layer tied to it keeps what it packed from the old weights
                model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
        return len(places)


def _manifest(values: dict[str, Any]) -> WeightManifest:
    shapes = tuple(tuple(shape) for shape in values["shapes"])
    columns = {name: tuple(values[name]) for name in ("names", "dtypes", "offsets", "checksums")}
    return WeightManifest(version=values["version"], shapes=shapes, **columns)
