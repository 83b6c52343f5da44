"""How the Megatron actor is split over processes and optimised."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_arpo.config.base import Settings


class LayoutSettings(Settings):
    tp: int = Field(default=1, ge=1)
    """Tensor parallel size; divides attention heads, KV heads and the padded vocabulary."""

    pp: int = Field(default=1, ge=1)
    """Pipeline stages; divides the number of layers."""

    dp: int = Field(default=1, ge=1)
    """Data parallel replicas."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


class OptimizerSettings(Settings):
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up, towards lr * final_lr_fraction at the last update."""

    warmup_updates: int = Field(default=0, ge=0)
    """Updates over which the rate rises linearly from 0."""

    final_lr_fraction: float = Field(default=0.1, ge=0, le=1)

    weight_decay: float = Field(default=0.01, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)

    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 switches clipping off."""


class ActorSettings(Settings):
    layout: LayoutSettings = LayoutSettings()
    optimizer: OptimizerSettings = OptimizerSettings()

    max_row_tokens: int = Field(default=11264, ge=16)
    """Tokens of one packed row, which is one micro-batch. A longer tree is split by repeating the prefix it needs."""

    mini_batch_prompts: int = Field(default=16, ge=1)
    """Prompts an optimizer update sees; divides rollout.prompts_per_step."""

    num_threads: int = Field(default=1, ge=1)
    """CPU threads of each actor process."""
