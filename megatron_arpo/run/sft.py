"""Cold-start supervised fine-tuning in the same Megatron actor: demonstrations as one-path trees, loss on what the model writes."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence

from megatron_arpo.actor.sums import add_up
from megatron_arpo.batch.flat import pack_sequences
from megatron_arpo.batch.schedule import RowCost, assign_rows
from megatron_arpo.config.run import RunConfig
from megatron_arpo.config.sft import SftSettings
from megatron_arpo.data.chat import encode_demonstration
from megatron_arpo.data.demonstrations import Demonstration
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.observe.progress import progress, say
from megatron_arpo.run.export import export_hf
from megatron_arpo.run.folder import RunFolder
from megatron_arpo.run.placement import Cluster
from megatron_arpo.run.step_batch import row_cost
from megatron_arpo.run.weight_sync import WeightSync
from megatron_arpo.types import PackedRow

COMMAND = "sft"
Encoded = tuple[Sequence[int], Sequence[int]]
"""(token ids, loss mask)"""


def fine_tune(config: RunConfig, folder: RunFolder, demonstrations: Sequence[Demonstration], architecture: Architecture) -> None:
    """Runs `sft.num_epochs`, from the newest checkpoint where there is one, and exports to the run folder's hf/."""
    sft = config.sft
    sequences = _encode(demonstrations, config)
    updates_an_epoch = max(1, len(sequences) // sft.batch_size)
    num_updates = updates_an_epoch * sft.num_epochs
    checkpoint, state = folder.starting_point(COMMAND, config, architecture)
    if checkpoint is not None:
        say(f"resuming from {checkpoint} (update {state.step} of {num_updates})")
    folder.write_config(config)
    folder.metrics.drop_after(state.step if checkpoint else -1)
    warmup = {"warmup_updates": round(sft.warmup_fraction * num_updates)}
    actor = config.actor.model_copy(update={"optimizer": config.actor.optimizer.model_copy(update=warmup)})
    config = config.model_copy(update={"actor": actor})
    with Cluster(config, num_updates, with_engine=False) as cluster, progress("SFT", num_updates, state.step) as bar:
        if checkpoint is not None:
            cluster.on_actors("load", checkpoint / "weights")
        while state.step < num_updates:
            started = time.perf_counter()
            epoch, index = divmod(state.step, updates_an_epoch)
            batch = _batch(sequences, sft, config.run.seed, epoch, index)
            sums = add_up(cluster.on_actors("sft_step", _rows(batch, config, row_cost(architecture))))
            state = dataclasses.replace(state, step=state.step + 1)
            seconds = time.perf_counter() - started
            values = {
                "loss": sums["loss"],
                "tokens": sums["tokens"],
                "grad_norm": sums["grad_norm_max"],
                "lr": sums["lr_max"],
                "seconds": round(seconds, 4),
                "tokens_per_second": sum(len(ids) for ids, _ in batch) / seconds,
            }
            folder.metrics.write("sft", state.step, values)
            bar.advance(f"loss {sums['loss']:.3f}  {values['tokens_per_second']:.0f} tokens/s")
            if state.step % config.run.save_every_steps == 0 or state.step == num_updates:
                folder.save_checkpoint(
                    COMMAND,
                    state,
                    architecture,
                    config.model.path,
                    write_weights=lambda path: cluster.on_actors("save", path),
                    keep=config.run.keep_checkpoints,
                )
        export_hf(WeightSync(cluster, config.weights, config.model), config.model.path, folder.hf)
    say(f"model in {folder.hf}")


def _encode(demonstrations: Sequence[Demonstration], config: RunConfig) -> list[Encoded]:
    """Drops demonstrations of more than sft.max_tokens tokens and says how many; ValueError where none is left."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    limit = min(config.sft.max_tokens, config.actor.max_row_tokens)
    encoded = [encode_demonstration(tokenizer, one.messages, one.response) for one in demonstrations]
    kept = [one for one in encoded if len(one[0]) <= limit]
    num_tokens, num_trained = sum(len(ids) for ids, _ in kept), sum(sum(mask) for _, mask in kept)
    dropped = f", {len(encoded) - len(kept)} dropped, longer than {limit} tokens" if len(kept) < len(encoded) else ""
    say(f"{len(kept)} demonstrations, {num_tokens} tokens of which {num_trained} in the loss{dropped}")
    if not kept:
        raise ValueError(f"sft.demonstrations: all are longer than {limit} tokens; raise sft.max_tokens and actor.max_row_tokens")
    return kept


def _batch(sequences: Sequence[Encoded], sft: SftSettings, seed: int, epoch: int, index: int) -> list[Encoded]:
    """Batch `index` of an epoch's shuffled order; the last incomplete one is left for the next epoch's shuffle."""
    order = list(range(len(sequences)))
    random.Random(f"sft {seed} {epoch}").shuffle(order)
    return [sequences[position] for position in order[index * sft.batch_size : (index + 1) * sft.batch_size]]


def _rows(batch: Sequence[Encoded], config: RunConfig, cost: RowCost) -> list[list[PackedRow]]:
    """Rows for each data-parallel rank, the mean over the batch's trained tokens in their weights."""
    layout = config.actor.layout
    num_trained = sum(sum(mask[1:]) for _, mask in batch)
    rank_tokens = -(-sum(len(ids) for ids, _ in batch) // layout.dp)
    longest = max(len(ids) for ids, _ in batch)
    row_tokens = min(config.actor.max_row_tokens, max(rank_tokens, longest))
    return assign_rows(pack_sequences(batch, 1.0 / num_trained, row_tokens), layout.dp, layout.micro_batch_multiple, cost)
