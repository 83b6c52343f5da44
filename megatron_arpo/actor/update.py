"""The actor's optimizer steps: policy updates on packed rows, supervised updates on demonstrations, and scoring without either."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_arpo.actor.forward import RowTensors, row_tensors, run_rows
from megatron_arpo.actor.sums import Sums, add_up
from megatron_arpo.algorithm.loss import ClipSettings, importance_weights, tree_policy_loss
from megatron_arpo.config.actor import OptimizerSettings
from megatron_arpo.config.algorithm import LossSettings
from megatron_arpo.types import PackedRow


class Updater:
    """Owns the wrapped model, its optimizer and its learning-rate schedule on one rank."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: TransformerConfig,
        vocab_size: int,
        optimizer: OptimizerSettings,
        num_updates: int,
    ) -> None:
        """`num_updates` is the length of the learning-rate schedule."""
        self._config = config
        self._vocab_size = vocab_size
        self.ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True, grad_reduce_in_fp32=True, average_in_collective=False, check_for_nan_in_grad=True
            ),
            model,
        )
        min_lr = optimizer.lr * (1.0 if optimizer.schedule == "constant" else optimizer.final_lr_fraction)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optimizer.lr,
                min_lr=min_lr,
                weight_decay=optimizer.weight_decay,
                adam_beta1=optimizer.beta1,
                adam_beta2=optimizer.beta2,
                adam_eps=optimizer.eps,
                clip_grad=optimizer.clip_grad,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=True,
            ),
            [self.ddp],
        )
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
        config.no_sync_func = self.ddp.no_sync

    def policy_step(self, mini_batches: Sequence[Sequence[PackedRow]], loss: LossSettings, temperature: float) -> list[Sums]:
        """One optimizer update a mini-batch, all against the policy before the first one.

        Rows are this data-parallel rank's. Returns what `Sums` says for each mini-batch, empty off the last pipeline stage.
        """
        batches = [[row_tensors(row) for row in rows] for rows in mini_batches]
        several = len(batches) > 1
        old = [self.logprobs(rows, temperature) for rows in batches] if several else None
        clip = ClipSettings(low=loss.clip_low, high=loss.clip_high, dual=loss.dual_clip)
        results = []
        for index, rows in enumerate(batches):
            old_of_row = None
            if old and old[index]:
                old_of_row = {id(row): logprobs for row, (logprobs, _) in zip(rows, old[index], strict=True)}

            def policy_loss(
                row: RowTensors,
                logprobs_N: torch.Tensor,
                entropy_N: torch.Tensor,
                old_of_row: Mapping[int, torch.Tensor] | None = old_of_row,
            ) -> tuple[torch.Tensor, dict[str, Any]]:
                old_N = old_of_row[id(row)] if old_of_row else logprobs_N.detach()
                importance_N = importance_weights(old_N, row.rollout_logprobs_N, loss.importance_cap) if loss.importance_cap else None
                total = tree_policy_loss(logprobs_N, old_N, row.advantage_pos_N, row.advantage_neg_N, clip, importance_N)
                return total, _policy_sums(row, total, logprobs_N.detach(), old_N, entropy_N, clip, loss.importance_cap)

            results.append(self._update(rows, policy_loss, temperature))
        return results

    def sft_step(self, rows: Sequence[PackedRow]) -> Sums:
        """One update towards the targets of `rows`, each weighted by its `weight`."""

        def negative_log_likelihood(
            row: RowTensors, logprobs_N: torch.Tensor, entropy_N: torch.Tensor
        ) -> tuple[torch.Tensor, dict[str, Any]]:
            loss = -(row.weight_N * logprobs_N).sum()
            return loss, {"loss": float(loss), "tokens": float(len(row.targets_N))}

        return self._update([row_tensors(row) for row in rows], negative_log_likelihood, temperature=1.0)

    @torch.no_grad()
    def logprobs(self, rows: Sequence[RowTensors], temperature: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(log-probs [N], entropies [N]) of each row's targets; an empty list off the last pipeline stage."""

        def keep(row: RowTensors, logprobs_N: torch.Tensor, entropy_N: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            return logprobs_N.sum() * 0.0, {"kept": (logprobs_N.detach(), entropy_N)}

        reports = run_rows(self.ddp, rows, keep, vocab_size=self._vocab_size, temperature=temperature, forward_only=True)
        return [report["kept"] for report in reports]

    def _update(self, rows: Sequence[RowTensors], target_loss: Any, temperature: float) -> Sums:
        started = time.perf_counter()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.schedule.step(increment=1)
        reports = run_rows(self.ddp, rows, target_loss, vocab_size=self._vocab_size, temperature=temperature, forward_only=False)
        succeeded, grad_norm, _ = self.optimizer.step()
        if not succeeded:
            raise FloatingPointError(f"optimizer update {self.schedule.num_steps} was refused: a gradient is not finite")
        if not reports:
            return {}
        sums = add_up(reports)
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


def _policy_sums(
    row: RowTensors,
    loss: torch.Tensor,
    logprobs_N: torch.Tensor,
    old_N: torch.Tensor,
    entropy_N: torch.Tensor,
    clip: ClipSettings,
    importance_cap: float | None,
) -> Sums:
    """Counts with multiplicity: those of the flat batch."""
    times_N = row.multiplicity_N
    ratio_N = (logprobs_N - old_N).exp()
    mismatch_N = (old_N - row.rollout_logprobs_N).abs()
    outside_N = (ratio_N < 1.0 - clip.low) | (ratio_N > 1.0 + clip.high)
    capped_N = (old_N - row.rollout_logprobs_N).exp() > (importance_cap or float("inf"))
    return {
        "loss": float(loss.detach()),
        "tokens": float(times_N.sum()),
        "unique_tokens": float(len(times_N)),
        "row_tokens": float(row.token_ids_1T.numel()),
        "clipped": float((times_N * outside_N).sum()),
        "ratio_kl": float((times_N * (ratio_N - 1.0 - (logprobs_N - old_N))).sum()),
        "entropy": float((times_N * entropy_N).sum()),
        "mismatch": float((times_N * mismatch_N).sum()),
        "importance_capped": float((times_N * capped_N).sum()),
        "mismatch_max": float(mismatch_N.max()) if len(mismatch_N) else 0.0,
    }
