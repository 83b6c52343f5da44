"""How much is sampled in a step and with which engine."""

from __future__ import annotations

from pydantic import Field

from megatron_arpo.config.base import Settings


class SamplingSettings(Settings):
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy; training needs a positive one."""

    top_p: float = Field(default=1.0, gt=0, le=1)


class RolloutSettings(Settings):
    prompts_per_step: int = Field(default=128, ge=1)
    """Prompts sampled between two weight updates of the engine."""

    max_response_tokens: int = Field(default=4096, ge=2)
    """Tokens of a trajectory after the prompt, tool results included."""

    max_concurrent_trees: int = Field(default=256, ge=1)
    """Trees that grow at the same time on one engine."""

    sampling: SamplingSettings = SamplingSettings()


class EngineSettings(Settings):
    max_model_len: int = Field(default=8192, ge=16)
    """Longest sequence the engine holds, prompt and response."""

    kv_cache_gib: float = Field(default=1.0, gt=0)
    """Size of the KV cache on CPU in GiB; on GPU `gpu_memory_utilization` decides."""

    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of the GPU's memory for weights and KV cache."""

    tp: int = Field(default=1, ge=1)
    """Tensor parallel size of one engine."""

    top_logprobs: int = Field(default=20, ge=1)
    """Log-probs returned a token; entropy is estimated from them and its error bound recorded. At or above the
    vocabulary's size the entropy is exact."""

    fp8: bool = False
    """Linear weights come to the engine in FP8, in blocks of 128 x 128 with a factor each, made from the actor's bf16: half the bytes to
    move and to hold. vLLM on CUDA alone."""

    sleep: bool = False
    """The engine gives its memory up while the actor is updated, for both on the same GPUs. vLLM's CPU build only stops and goes on."""

    seed: int = 0
