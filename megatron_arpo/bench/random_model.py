"""A Hugging Face folder of random weights, made a block at a time, of any size."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from megatron_arpo.families.architecture import architecture_from_config
from megatron_arpo.families.parameters import all_parameters, hf_shapes
from megatron_arpo.weights.hf_folder import write_hf_folder
from megatron_arpo.weights.lazy_tensor import num_columns, rows_in_block


class RandomTensor:
    """Rows drawn from a normal distribution; the same for the same seed."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
        self.shape, self.dtype, self._seed = shape, dtype, seed

    def read_rows(self, start: int, out: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(self._seed * 100_003 + start)
        step = 1 + min(rows_in_block(self), len(out)) // 16
        block = torch.empty((step, num_columns(self))).normal_(std=0.02, generator=generator)
        for first in range(0, len(out), step):  # the same rows over and over: drawing costs more than all the rest
            rows = out[first : first + step]
            rows.copy_(block[: len(rows)])
            rows[:, 0] = first + start


def qwen3_config(*, num_layers: int, hidden_size: int, ffn_hidden_size: int, vocab_size: int) -> dict:
    """A tied Qwen3 with heads of 128, two queries for each key and value."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "vocab_size": vocab_size,
        "hidden_size": hidden_size, "intermediate_size": ffn_hidden_size, "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // 128, "num_key_value_heads": hidden_size // 256, "head_dim": 128,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "hidden_act": "silu",
    }  # fmt: skip


def write_random_model(folder: Path, config: dict, workers: int) -> None:
    """Weights of the model's dtype, and config.json."""
    architecture = architecture_from_config(config, "the bench's model")
    names = [
        (name, shape)
        for parameter in all_parameters(architecture)
        for name, shape in zip(parameter.hf_names, hf_shapes(parameter.name, architecture), strict=True)
    ]
    dtype = getattr(torch, config["torch_dtype"])
    tensors = {name: RandomTensor(shape, dtype, seed) for seed, (name, shape) in enumerate(names)}
    with tempfile.TemporaryDirectory() as config_folder:
        (Path(config_folder) / "config.json").write_text(json.dumps(config))
        write_hf_folder(folder, tensors, Path(config_folder), workers=workers)
