"""Which optional kernels are installed, Transformer Engine and Apex, and which FP8 recipes this device runs."""

from __future__ import annotations

import importlib.util
import re
from typing import Literal

import torch

from megatron_arpo.config.actor import ActorSettings
from megatron_arpo.config.packages import INSTALL_TRANSFORMER_ENGINE, TRANSFORMER_ENGINE_VERSIONS, installed_version

LEAST_CAPABILITY = {"tensorwise": (8, 9), "delayed": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""Compute capability that an FP8 recipe needs."""

LayerImplementation = Literal["local", "transformer_engine"]


def transformer_engine_version() -> str | None:
    """None where Transformer Engine, with its part for PyTorch, is not installed."""
    return installed_version("transformer-engine") if installed_version("transformer-engine-torch") else None


def transformer_engine_obstacle() -> str | None:
    """Why layers of Transformer Engine can't run here; None where they can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    version = transformer_engine_version()
    if version is None:
        return f"Transformer Engine is not installed ({INSTALL_TRANSFORMER_ENGINE})"
    major, minor = (int(part) for part in re.findall(r"\d+", version)[:2])
    if not (2, 9) <= (major, minor) < (2, 12):
        return f"Transformer Engine {version} is installed, {TRANSFORMER_ENGINE_VERSIONS} is needed ({INSTALL_TRANSFORMER_ENGINE})"
    return None


def fp8_obstacle(recipe: str) -> str | None:
    """Why an FP8 recipe can't run here, in one phrase; None where it can."""
    if obstacle := transformer_engine_obstacle():
        return obstacle
    found, needed = torch.cuda.get_device_capability(), LEAST_CAPABILITY[recipe]
    if found < needed:
        return f"{torch.cuda.get_device_name()} has compute capability {found[0]}.{found[1]}, it needs {needed[0]}.{needed[1]}"
    return None


def check_kernels(actor: ActorSettings) -> None:
    """Raises ValueError, in one sentence, where the configuration asks for what this machine can't run."""
    if actor.transformer == "transformer_engine" and (obstacle := transformer_engine_obstacle()):
        raise ValueError(f"actor.transformer=transformer_engine: {obstacle}; use auto or local")
    if actor.optimizer.cpu_offload_fraction and not torch.cuda.is_available():
        raise ValueError("actor.optimizer.cpu_offload_fraction moves state off a CUDA device, and there is none; set it to 0")
    modules = actor.recompute.modules if actor.recompute and actor.recompute.granularity == "selective" else ()
    for module in {"moe_act", "layernorm"} & set(modules):
        if actor.transformer == "local" or transformer_engine_obstacle():
            raise ValueError(f"actor.recompute.modules: {module} is recomputed in Transformer Engine's layers alone; take it out")
    if actor.fp8 is None:
        return
    if actor.transformer == "local":
        raise ValueError("actor.fp8 runs in Transformer Engine's layers, but actor.transformer=local; use auto or transformer_engine")
    if obstacle := fp8_obstacle(actor.fp8.recipe):
        raise ValueError(f"actor.fp8.recipe={actor.fp8.recipe}: {obstacle}; remove actor.fp8 to train in bf16")


def layer_implementation(actor: ActorSettings) -> LayerImplementation:
    """What `actor.transformer` comes to on this machine. Raises as `check_kernels`."""
    check_kernels(actor)
    if actor.transformer != "auto":
        return actor.transformer
    return "local" if transformer_engine_obstacle() else "transformer_engine"


def has_fused_weight_gradient() -> bool:
    """True where Apex's kernel that adds weight gradients straight into the fp32 buffer is there; Megatron's own layers use it."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
