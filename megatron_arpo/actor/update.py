"""The actor's optimizer: an update for any loss over the rows' targets, supervised updates, and log-probs without an update."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_arpo.actor.device import on_cuda
from megatron_arpo.actor.forward import TargetLoss, run_rows
from megatron_arpo.actor.layout import slice_multiple
from megatron_arpo.actor.offload import allocate_states, hold_weights_once, hybrid_optimizers
from megatron_arpo.actor.row_tensors import RowTensors, row_tensors
from megatron_arpo.actor.sums import Sums, add_up
from megatron_arpo.actor.target_logprobs import LogitSettings
from megatron_arpo.config.actor import OptimizerSettings
from megatron_arpo.types import PackedRow


class Updater:
    """Owns the wrapped model chunks, their optimizer and its learning-rate schedule on one rank."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: TransformerConfig,
        logits: LogitSettings,
        optimizer: OptimizerSettings,
        num_updates: int,
    ) -> None:
        """`num_updates` is the length of the learning-rate schedule."""
        self._logits = logits
        self._slice_multiple = slice_multiple(config)
        self._one_length = not config.variable_seq_lengths
        sharded = optimizer.kind == "adam"
        wrapping = DistributedDataParallelConfig(
            use_distributed_optimizer=sharded, grad_reduce_in_fp32=True, average_in_collective=False, check_for_nan_in_grad=True
        )
        self.chunks = [DistributedDataParallel(config, wrapping, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)]
        min_lr = optimizer.lr * (1.0 if optimizer.schedule == "constant" else optimizer.final_lr_fraction)
        optimizer_config = OptimizerConfig(
            optimizer=optimizer.kind,
            lr=optimizer.lr,
            min_lr=min_lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_eps=optimizer.eps,
            sgd_momentum=0.0,
            clip_grad=optimizer.clip_grad,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=sharded,
            optimizer_cpu_offload=optimizer.cpu_offload_fraction > 0,
            optimizer_offload_fraction=optimizer.cpu_offload_fraction,
            overlap_cpu_optimizer_d2h_h2d=on_cuda(),
        )
        if optimizer.cpu_offload_fraction:
            hold_weights_once(optimizer_config)
        self.optimizer = get_megatron_optimizer(optimizer_config, self.chunks)
        for hybrid in hybrid_optimizers(self.optimizer):
            allocate_states(hybrid)
        if sharded and not optimizer.cpu_offload_fraction:
            _allocate_states(self.optimizer)
        self.schedule = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=optimizer.lr,
            min_lr=min_lr,
            lr_warmup_steps=optimizer.warmup_updates,
            lr_decay_steps=max(num_updates, optimizer.warmup_updates + 1),
            lr_decay_style=optimizer.schedule,
            start_wd=optimizer.weight_decay,
            end_wd=optimizer.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )
        config.finalize_model_grads_func = _finalize
        config.grad_scale_func = self.optimizer.scale_loss
        no_sync = [chunk.no_sync for chunk in self.chunks]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def tensors(self, rows: Sequence[PackedRow]) -> list[RowTensors]:
        """The micro-batches of one call on the device, padded as this layout needs it."""
        multiple = self._slice_multiple
        if self._one_length:
            num_ranks = parallel_state.get_context_parallel_world_size()
            longest = max(len(row) for row in rows)
            multiple *= -(-longest // (multiple * num_ranks))
        return [row_tensors(row, multiple) for row in rows]

    def sft_step(self, rows: Sequence[PackedRow]) -> Sums:
        """One update towards the targets of `rows`, each weighted by its `weight`."""

        def negative_log_likelihood(row: RowTensors, logprobs_N: torch.Tensor, _entropy_N: torch.Tensor) -> tuple[torch.Tensor, dict]:
            loss = -(row.weight_N * logprobs_N).sum()
            return loss, {"loss": loss.detach(), "tokens": torch.tensor(float(len(row.targets_N)))}

        return self.step(self.tensors(rows), negative_log_likelihood, temperature=1.0)

    @torch.no_grad()
    def logprobs(self, rows: Sequence[RowTensors], temperature: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(log-probs [N], entropies [N]) of each row's targets; an empty list off the last pipeline stage."""

        def keep(row: RowTensors, logprobs_N: torch.Tensor, entropy_N: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            return logprobs_N.sum() * 0.0, {"kept": (logprobs_N.detach(), entropy_N)}

        reports = run_rows(self.chunks, rows, keep, logits=self._logits, temperature=temperature, forward_only=True)
        return [report["kept"] for report in reports]

    def step(self, rows: Sequence[RowTensors], target_loss: TargetLoss, temperature: float) -> Sums:
        """One update with the sum of the rows' losses. Returns the sums that `target_loss` handed back, tensors of one number
        each, over this rank's rows; nothing off the last pipeline stage. Raises FloatingPointError for a gradient that is not finite."""
        started = time.perf_counter()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.schedule.step(increment=1)
        reports = run_rows(self.chunks, rows, target_loss, logits=self._logits, temperature=temperature, forward_only=False)
        succeeded, grad_norm, _ = self.optimizer.step()
        if not succeeded:
            raise FloatingPointError(f"optimizer update {self.schedule.num_steps} was refused: a gradient is not finite")
        if not reports:
            return {}
        sums = add_up([{name: float(value) for name, value in report.items()} for report in reports])
        sums["grad_norm_max"] = float(grad_norm or 0.0)
        sums["lr_max"] = self.optimizer.param_groups[0]["lr"]
        sums["seconds_max"] = time.perf_counter() - started
        return sums


def _allocate_states(optimizer: ChainedOptimizer) -> None:
    """Adam's moments, which would come with the first update: a run may save a checkpoint before it."""
    for one in optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                one.optimizer.state[parameter] = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


def _finalize(chunks: list[torch.nn.Module], _num_tokens: torch.Tensor | None = None, **options: Any) -> None:
    """Megatron's gradient reduction without its division by tokens: our losses carry global denominators already."""
    finalize_model_grads(chunks, None, **options)
