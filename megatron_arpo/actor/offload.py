"""Adam's state in host memory, by Megatron's HybridDeviceOptimizer: what it leaves out of beginnings and of checkpoints.

For megatron-core 0.16.1. The optimizer keeps one inner optimizer a parameter on the host and one for the rest on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer


def hold_weights_once(config: OptimizerConfig) -> None:
    """The hybrid optimizer then has the only fp32 weights, beside the bf16 ones of the model. Otherwise Megatron keeps a second fp32
    copy on the device, and can't load the checkpoint of an offloaded optimizer.

    The fields are set behind the constructor, which asks for the version of Transformer Engine though the hybrid optimizer needs
    none, and fails where it is not installed.
    """
    config.use_precision_aware_optimizer = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    config.store_param_remainders = False


def hybrid_optimizers(optimizer: ChainedOptimizer) -> list[HybridDeviceOptimizer]:
    return [one.optimizer for one in optimizer.chained_optimizers if isinstance(one.optimizer, HybridDeviceOptimizer)]


def allocate_states(hybrid: HybridDeviceOptimizer) -> None:
    """Moments of zero, which would come with the first update: a checkpoint may be saved or loaded before it."""
    for inner in hybrid.sub_optimizers:
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
                if isinstance(inner, torch.optim.AdamW):
                    state["step"] = torch.tensor(0.0)
                inner.state[parameter] = state
    hybrid._sync_sub_optimizers_state_to_hdo()


def drop_classes(state: dict[Any, Any]) -> None:
    """From an optimizer's state before it is saved: the hybrid optimizer has its inner optimizers' classes among the settings of its
    groups, which no checkpoint can hold and no load needs."""
    for group in state.get("param_groups", ()):
        group.pop("cpu_optimizer_cls", None)
        group.pop("gpu_optimizer_cls", None)
    for value in state.values():
        if isinstance(value, dict):
            drop_classes(value)


def let_steps_advance(hybrid: HybridDeviceOptimizer) -> None:
    """After a load. The outer groups then have the step of the checkpoint, and before each update they overwrite the inner groups,
    which count on: the device's part would stay at the bias correction of the step that was loaded."""
    for group in hybrid.param_groups:
        group.pop("step", None)
