"""How the engine's weights follow the actor's, and how that is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from megatron_arpo.config.base import Settings


class WeightSettings(Settings):
    transport: Literal["shared_memory", "cuda_ipc", "broadcast", "checkpoint"] = "shared_memory"
    """shared_memory: one host. cuda_ipc: actors and engine on the same GPUs or host. broadcast: process groups (NCCL, gloo), any
    hosts. checkpoint: a folder that both sides see, slow, for engines that restart from it."""

    folder: Path | None = None
    """Of transport=checkpoint: where a folder of the weights is made, on a disk that all hosts see; the run folder by default."""

    bucket_bytes: int = Field(default=512 * 2**20, ge=2**20)
    """Weights that are on their way at a time; layers of an engine are not torn, so a larger layer makes a larger bucket."""

    keep_old: bool = True
    """The engine serves the old version until all of the new one lies beside it, in memory of its host, and a failed update leaves
    the old one serving. False: buckets are loaded as they come, two at a time exist, and generation is held meanwhile."""

    in_flight: Literal["keep", "recompute"] = "keep"
    """Requests that live through an update go on; their keys and values are kept, or made anew with the new weights."""

    tries: int = Field(default=2, ge=1)
    """Times an update is tried before the run stops."""

    timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for the other side (broadcast)."""

    verify: Literal["off", "checksum", "logprob"] = "logprob"
    """checksum: every fragment's bytes; logprob: that, and after each sync both sides score the same tokens."""

    verify_sequences: int = Field(default=8, ge=1)
    """Sequences scored by both sides after a sync."""

    max_logprob_diff: float = Field(default=1e-3, gt=0)
    """Bound on the largest difference with model.dtype=float32; past it the run stops."""

    mean_logprob_diff: float = Field(default=0.02, gt=0)
    """Bound on the mean difference with model.dtype=bfloat16; past it the run stops."""

    @model_validator(mode="after")
    def _transport_fits(self) -> WeightSettings:
        if self.transport == "cuda_ipc" and self.keep_old:
            raise ValueError(
                "weights.transport=cuda_ipc has no room for a second version on the GPU; set weights.keep_old=false or use shared_memory"
            )
        if self.transport == "checkpoint" and not self.keep_old:
            raise ValueError("weights.transport=checkpoint always keeps the old version; set weights.keep_old=true")
        if self.folder is not None and self.transport != "checkpoint":
            raise ValueError(f"weights.folder={self.folder} is for weights.transport=checkpoint; take it out")
        return self
