"""What is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from megatron_arpo.config.base import Settings


class ModelSettings(Settings):
    path: Path
    """Hugging Face folder with config.json, safetensors and tokenizer; the weights a run starts from."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations in actor and engine; float32 on CPU gives exact comparisons. Optimizer state and
    gradient reduction are float32 in either case."""
