"""How the Megatron actor is split over processes and optimised."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_arpo.config.base import Settings


class LayoutSettings(Settings):
    """How the processes split the model; tp * pp * cp * dp of them, each on one device."""

    tp: int = Field(default=1, ge=1)
    """Tensor parallel size; divides attention heads and KV heads."""

    sequence_parallel: bool = False
    """Split norms and residuals along the sequence over the tensor-parallel ranks; saves activation memory. Needs tp > 1."""

    pp: int = Field(default=1, ge=1)
    """Pipeline stages; pp * vpp divides the number of layers."""

    vpp: int = Field(default=1, ge=1)
    """Model chunks a pipeline stage holds (interleaved schedule): a smaller bubble for more communication. Needs pp > 1."""

    cp: int = Field(default=1, ge=1)
    """Context parallel size: a rank holds a slice of each row's queries and gathers its keys and values."""

    ep: int = Field(default=1, ge=1)
    """Expert parallel size; divides the number of experts and, with etp, the tp * cp * dp ranks of a stage."""

    etp: int = Field(default=1, ge=1)
    """Tensor parallel size inside an expert."""

    dp: int = Field(default=1, ge=1)
    """Data parallel replicas."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def micro_batch_multiple(self) -> int:
        """What the number of micro-batches must be a multiple of: an interleaved pipeline runs them in groups of its stages."""
        return self.pp if self.vpp > 1 else 1

    @model_validator(mode="after")
    def _fits(self) -> LayoutSettings:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("actor.layout.sequence_parallel=true splits over tensor-parallel ranks, but tp=1; raise tp or set it to false")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"actor.layout.vpp={self.vpp} interleaves pipeline stages, but pp=1; raise pp or set vpp to 1")
        stage_ranks = self.tp * self.cp * self.dp
        if stage_ranks % (self.ep * self.etp):
            raise ValueError(
                f"actor.layout.ep={self.ep} times etp={self.etp} must divide the {stage_ranks} ranks of a pipeline stage "
                f"(tp * cp * dp); use a smaller ep or raise dp"
            )
        return self


class RecomputeSettings(Settings):
    """Activations that the backward pass computes again instead of keeping."""

    granularity: Literal["selective", "full"]
    """selective: the named modules; full: whole layers, of which only the input is kept."""

    modules: tuple[Literal["core_attn", "layernorm", "mlp", "moe", "moe_act"], ...] = ("core_attn",)
    """What selective recomputes; core_attn gains nothing with FlexAttention, which keeps no scores."""

    layers: int = Field(default=1, ge=1)
    """Layers that full recomputes as one unit."""


class Fp8Settings(Settings):
    """FP8 matrix products through Transformer Engine."""

    recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = "blockwise"
    """Scaling: tensorwise and delayed from compute capability 8.9, blockwise 9.0 (Hopper), mxfp8 10.0 (Blackwell)."""

    format: Literal["e4m3", "hybrid"] = "e4m3"
    """hybrid keeps gradients in e5m2."""

    first_last_layers_bf16: bool = True
    """Keep the first and the last layer in bf16, where errors cost most. The delayed recipe can't."""

    @model_validator(mode="after")
    def _fits(self) -> Fp8Settings:
        if self.recipe == "delayed" and self.first_last_layers_bf16:
            raise ValueError("actor.fp8.recipe=delayed has no bf16 layers; set actor.fp8.first_last_layers_bf16 to false or use tensorwise")
        return self


class OptimizerSettings(Settings):
    kind: Literal["adam", "sgd"] = "adam"
    """adam is AdamW, its state sharded over the data-parallel ranks; sgd has no state and no shards, for comparing layouts."""

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

    cpu_offload_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the optimizer's state, fp32 weights included, that lives and is updated in host memory."""

    @model_validator(mode="after")
    def _fits(self) -> OptimizerSettings:
        if self.cpu_offload_fraction and self.kind != "adam":
            raise ValueError("actor.optimizer.cpu_offload_fraction moves Adam's state, which sgd has not; set it to 0")
        return self


class ActorSettings(Settings):
    layout: LayoutSettings = LayoutSettings()
    optimizer: OptimizerSettings = OptimizerSettings()

    transformer: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layer implementation: Transformer Engine on CUDA where it is installed, else Megatron's own modules."""

    recompute: RecomputeSettings | None = None

    fp8: Fp8Settings | None = None

    logits_chunk_tokens: int = Field(default=2048, ge=1)
    """Targets whose logits exist at a time: 8 bytes * vocabulary / tp each, a copy included."""

    max_row_tokens: int = Field(default=11264, ge=16)
    """Tokens of one packed row, which is one micro-batch. A longer tree is split by repeating the prefix it needs."""

    mini_batch_prompts: int = Field(default=16, ge=1)
    """Prompts an optimizer update sees; divides rollout.prompts_per_step."""

    largest_to_mean_cost: float = Field(default=1.1, gt=1)
    """How far the costliest micro-batch may stand above the mean before trees are split to even them out."""

    num_threads: int = Field(default=1, ge=1)
    """CPU threads of each actor process."""

    @model_validator(mode="after")
    def _fits(self) -> ActorSettings:
        if self.recompute is None or self.recompute.granularity == "full":
            return self
        lost = sorted({"layernorm", "moe_act"} & set(self.recompute.modules))
        if self.fp8 is not None and self.fp8.recipe == "delayed" and lost:
            raise ValueError(f"actor.recompute.modules: the delayed FP8 recipe can't recompute {lost[0]}; use tensorwise or take it out")
        return self
