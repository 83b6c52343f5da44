"""Cold-start supervised fine-tuning in the same Megatron actor: demonstrations as one-path trees, loss on what the model writes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import closing

from megatron_arpo.actor.sums import add_up
from megatron_arpo.batch.flat import pack_sequences
from megatron_arpo.batch.schedule import RowCost, assign_rows
from megatron_arpo.config.run import RunConfig
from megatron_arpo.data.dataset_info import DemonstrationFile
from megatron_arpo.data.loader import BatchPlan, load_batches
from megatron_arpo.data.sequence_cache import SequenceBatch, SequenceCache
from megatron_arpo.data.tokenise import SequenceCounts, TokeniseSettings, tokenise
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.observe.progress import progress, say
from megatron_arpo.run.folder import RunFolder, StartingPoint
from megatron_arpo.run.placement import Cluster
from megatron_arpo.run.step_batch import row_cost
from megatron_arpo.types import PackedRow
from megatron_arpo.weights.export import export_hf


def fine_tune(
    config: RunConfig, folder: RunFolder, start: StartingPoint, files: Sequence[DemonstrationFile], architecture: Architecture
) -> None:
    """Runs `sft.num_epochs`, from `start`, and exports to the run folder's hf/."""
    sft, checkpoint, state = config.sft, start.checkpoint, start.state
    cache, counts = _tokenised(files, config, folder)
    plan = BatchPlan(len(cache), sft.batch_size, config.run.seed)
    num_updates, cost = plan.batches_an_epoch * sft.num_epochs, row_cost(architecture)
    if checkpoint is not None:
        say(f"resuming from {checkpoint} (update {state.step} of {num_updates})")
    folder.write_config(config)
    folder.metrics.drop_after(state.step if checkpoint else -1)
    if checkpoint is None:
        folder.metrics.write("sft_data", 0, dataclasses.asdict(counts))
    warmup = {"warmup_updates": round(sft.warmup_fraction * num_updates)}
    actor = config.actor.model_copy(update={"optimizer": config.actor.optimizer.model_copy(update=warmup)})
    config = config.model_copy(update={"actor": actor})
    batches = load_batches(cache, plan, first=state.step, last=num_updates, kind=sft.loader, num_workers=sft.loader_workers)
    with closing(batches), Cluster(config, num_updates, with_engine=False) as cluster, progress("SFT", num_updates, state.step) as bar:
        if checkpoint is not None:
            cluster.on_actors("load", checkpoint / "weights")
        while state.step < num_updates:
            started = time.perf_counter()
            batch = next(batches)
            waited = time.perf_counter() - started
            sums = add_up(cluster.on_actors("sft_step", _rows(batch, config, cost)))
            state = dataclasses.replace(state, step=state.step + 1)
            seconds = time.perf_counter() - started
            values = {
                "loss": sums["loss"],
                "tokens": sums["tokens"],
                "grad_norm": sums["grad_norm_max"],
                "lr": sums["lr_max"],
                "seconds": round(seconds, 4),
                "data_wait_seconds": round(waited, 4),
                "tokens_per_second": len(batch.token_ids) / seconds,
            }
            folder.metrics.write("sft", state.step, values)
            bar.advance(f"loss {sums['loss']:.3f}  {values['tokens_per_second']:.0f} tokens/s")
            if state.step % config.run.save_every_steps == 0 or state.step == num_updates:
                folder.save_checkpoint("sft", config, state, architecture, write_weights=lambda path: cluster.on_actors("save", path))
        export_hf(cluster.actors, config.model.path, folder.hf)
    say(f"model in {folder.hf}")


def _tokenised(files: Sequence[DemonstrationFile], config: RunConfig, folder: RunFolder) -> tuple[SequenceCache, SequenceCounts]:
    """The run's sequences, tokenised unless a run before did, and said what is in them."""
    from transformers import AutoTokenizer

    settings = TokeniseSettings(
        all_turns=config.sft.learn == "all_turns",
        learn_results=config.sft.learn_results,
        max_tokens=min(config.sft.max_tokens, config.actor.max_row_tokens),
    )
    cache, counts = tokenise(files, AutoTokenizer.from_pretrained(config.model.path), settings, folder.sequences, say)
    dropped = f", {counts.rows_too_long} dropped, longer than {settings.max_tokens} tokens" if counts.rows_too_long else ""
    repaired = f", {counts.rows_repaired} with a broken escape repaired" if counts.rows_repaired else ""
    say(f"{counts.sequences} demonstrations, {counts.tokens} tokens of which {counts.loss_tokens} in the loss{dropped}{repaired}")
    return cache, counts


def _rows(batch: SequenceBatch, config: RunConfig, cost: RowCost) -> list[list[PackedRow]]:
    """Rows for each data-parallel rank, the mean over the batch's trained tokens in their weights."""
    sequences, layout = batch.sequences(), config.actor.layout
    num_trained = sum(sum(mask[1:]) for _, mask in sequences)
    rank_tokens = -(-len(batch.token_ids) // layout.dp)
    micro_batches = 1 if layout.pp == 1 else 4 * layout.pp  # enough to keep the stages of a pipeline busy
    row_tokens = min(config.actor.max_row_tokens, max(-(-rank_tokens // micro_batches), int(batch.lengths.max())))
    return assign_rows(pack_sequences(sequences, 1.0 / num_trained, row_tokens), layout.dp, layout.micro_batch_multiple, cost)
