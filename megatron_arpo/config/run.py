"""The root of a configuration file and the checks across its sections."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from megatron_arpo.config.actor import ActorSettings
from megatron_arpo.config.algorithm import AlgorithmSettings
from megatron_arpo.config.base import Settings
from megatron_arpo.config.data import DataSettings
from megatron_arpo.config.evaluation import EvalSettings
from megatron_arpo.config.model import ModelSettings
from megatron_arpo.config.rollout import EngineSettings, RolloutSettings
from megatron_arpo.config.sft import SftSettings
from megatron_arpo.config.tools import ToolSettings
from megatron_arpo.config.weights import WeightSettings


class RunSettings(Settings):
    dir: Path
    """Run folder: config.yaml, metrics.jsonl, rollouts/, checkpoints/, hf/."""

    seed: int = Field(default=0, ge=0)
    """Every random number is drawn from a generator keyed by this, the step and the prompt."""

    num_steps: int = Field(default=100, ge=1)
    """Training steps in all; a resumed run goes on to this number."""

    save_every_steps: int = Field(default=20, ge=1)
    """Steps between checkpoints; the last step is always saved."""

    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""

    resume: bool = True
    """Go on from the run folder's newest checkpoint; false refuses a folder that has one."""

    replay: Path | None = None
    """Rollout folder of another run: its recorded steps are trained on in place of new rollouts, no engine is started."""


class RunConfig(Settings):
    run: RunSettings
    model: ModelSettings
    data: DataSettings = DataSettings()
    sft: SftSettings | None = None
    algorithm: AlgorithmSettings = AlgorithmSettings()
    rollout: RolloutSettings = RolloutSettings()
    engine: EngineSettings = EngineSettings()
    tools: ToolSettings = ToolSettings()
    reward: str = "deep_research"
    """deep_research | math | qa, or pkg.module:function of your own."""
    actor: ActorSettings = ActorSettings()
    weights: WeightSettings = WeightSettings()
    eval: EvalSettings = EvalSettings()

    @model_validator(mode="after")
    def _sections_fit(self) -> RunConfig:
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        if self.engine.fp8 and self.model.dtype != "bfloat16":
            raise ValueError(f"engine.fp8=true makes FP8 of bf16 weights, model.dtype={self.model.dtype}; use bfloat16 or fp8=false")
        if longest > self.engine.max_model_len:
            raise ValueError(
                f"engine.max_model_len={self.engine.max_model_len} is less than data.max_prompt_tokens + "
                f"rollout.max_response_tokens = {longest}; raise engine.max_model_len to {longest} or more"
            )
        if longest > self.actor.max_row_tokens:
            raise ValueError(
                f"actor.max_row_tokens={self.actor.max_row_tokens} cannot hold one trajectory of data.max_prompt_tokens + "
                f"rollout.max_response_tokens = {longest} tokens; raise actor.max_row_tokens to {longest} or more"
            )
        if self.rollout.prompts_per_step % self.actor.mini_batch_prompts:
            raise ValueError(
                f"actor.mini_batch_prompts={self.actor.mini_batch_prompts} must divide "
                f"rollout.prompts_per_step={self.rollout.prompts_per_step}"
            )
        if self.rollout.sampling.temperature == 0:
            raise ValueError(
                "rollout.sampling.temperature=0 samples the same trajectory every time; use a positive temperature, 1.0 by default"
            )
        if self.rollout.sampling.top_p != 1:
            raise ValueError(
                f"rollout.sampling.top_p={self.rollout.sampling.top_p} samples from another distribution than the one trained; use 1"
            )
        if self.model.dtype == "float32" and (self.actor.fp8 or self.actor.optimizer.cpu_offload_fraction):
            raise ValueError("model.dtype=float32 goes with neither actor.fp8 nor actor.optimizer.cpu_offload_fraction; use bfloat16")
        return self
