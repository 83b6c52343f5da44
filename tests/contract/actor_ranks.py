"""What every rank of tests/contract/test_actor_layouts.py does: one launch a layout, all checks in it, results in a file.

Run as `python -m tests.contract.actor_ranks RANK WORLD JOB.json`.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import torch  # noqa: E402

from megatron_arpo.actor import checkpoint, layout  # noqa: E402
from megatron_arpo.actor.device import prepare  # noqa: E402
from megatron_arpo.actor.forward import RowTensors, row_tensors, run_rows  # noqa: E402
from megatron_arpo.actor.model import build_model, transformer_config, unwrap  # noqa: E402
from megatron_arpo.actor.update import Updater  # noqa: E402
from megatron_arpo.algorithm.advantage import group_advantages, leaf_weights  # noqa: E402
from megatron_arpo.algorithm.loss import ClipSettings, tree_policy_loss  # noqa: E402
from megatron_arpo.batch.flat import pack_sequences  # noqa: E402
from megatron_arpo.batch.schedule import assign_rows  # noqa: E402
from megatron_arpo.batch.tree import WeightedTree, pack_trees  # noqa: E402
from megatron_arpo.config.actor import OptimizerSettings  # noqa: E402
from megatron_arpo.config.algorithm import LossSettings  # noqa: E402
from megatron_arpo.families.architecture import read_architecture  # noqa: E402
from megatron_arpo.types import PackedRow, ParallelLayout  # noqa: E402
from megatron_arpo.weights.megatron import gather_hf_weights, load_hf_weights  # noqa: E402
from megatron_arpo.weights.safetensors_folder import tensor_reader  # noqa: E402
from tests.unit.trees import flat_trees, random_tree  # noqa: E402

CLIP = ClipSettings(low=0.2, high=0.2, dual=3.0)


def updater_of(model_path: Path, tp: int, pp: int) -> tuple[Updater, object]:
    architecture = read_architecture(model_path)
    config = transformer_config(architecture, torch.float32, tp, pp)
    model = build_model(config, architecture)
    load_hf_weights(unwrap(model), architecture, tensor_reader(model_path))
    settings = OptimizerSettings(lr=1e-3, schedule="linear", warmup_updates=2)
    return Updater(model, config, architecture.vocab_size, settings, num_updates=20), architecture


def scores(updater: Updater) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 300, (length,), generator=generator).tolist() for length in (7, 19, 30)]
    rows = pack_sequences([(ids, [1] * len(ids)) for ids in sequences], 1.0, 40)
    found = updater.logprobs([row_tensors(row) for row in rows], temperature=1.0)
    return [value for logprobs, _ in found for value in logprobs.tolist()]


def batch_rows(form: str) -> list[PackedRow]:
    trees = [random_tree(seed, num_initial=4, prompt_id=str(seed)) for seed in (21, 22, 23)]
    weights = leaf_weights(trees, "token-mean")
    weighted = [
        WeightedTree(tree=tree, advantages=group_advantages([r.score for r in tree.rewards]), weights=w)
        for tree, w in zip(trees, weights, strict=True)
    ]
    if form == "flat":
        weighted = [
            WeightedTree(tree=path, advantages=(advantage,), weights=(weight,))
            for one in weighted
            for path, advantage, weight in zip(flat_trees(one.tree), one.advantages, one.weights, strict=True)
        ]
    return pack_trees(weighted, 40 if form == "split" else 4096)


def gradients(updater: Updater, rows: list[PackedRow]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the clipped objective against the recorded rollout log-probs, so that clipping is at work."""

    def loss_of(row: RowTensors, logprobs_N: torch.Tensor, _entropy_N: torch.Tensor) -> tuple[torch.Tensor, dict]:
        loss = tree_policy_loss(logprobs_N, row.rollout_logprobs_N, row.advantage_pos_N, row.advantage_neg_N, CLIP)
        return loss, {"loss": float(loss.detach())}

    mine = assign_rows(rows, torch.distributed.get_world_size(dp_group()))[torch.distributed.get_rank(dp_group())]
    updater.ddp.zero_grad_buffer()
    reports = run_rows(
        updater.ddp, [row_tensors(row) for row in mine], loss_of, vocab_size=updater._vocab_size, temperature=1.0, forward_only=False
    )
    loss = torch.tensor([sum(report["loss"] for report in reports)], dtype=torch.float64)
    torch.distributed.all_reduce(loss, group=dp_group())
    updater.optimizer.prepare_grads()  # what each rank's optimizer sees: its own shard after the reduce-scatter
    shards = [one for group in updater.optimizer.param_groups for one in group["params"]]
    return float(loss), {str(index): one.grad.clone() for index, one in enumerate(shards)}


def dp_group() -> torch.distributed.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Per tensor, relative to the tensor's largest value."""
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-12)) for name in theirs)


def adam_losses(updater: Updater, num_updates: int) -> list[list[float]]:
    ranks = assign_rows(batch_rows("tree"), torch.distributed.get_world_size(dp_group()))
    mine = ranks[torch.distributed.get_rank(dp_group())]
    found = []
    for _ in range(num_updates):
        (sums,) = updater.policy_step([mine], LossSettings(), temperature=1.0)
        found.append([sums["loss"], sums["grad_norm_max"]] if sums else [])
    return found


def weights_digest(updater: Updater, architecture: object) -> dict[str, float]:
    return {name: float(tensor.double().sum()) for name, tensor in gather_hf_weights(unwrap(updater.ddp), architecture)}


def check(job: dict, rank: int) -> dict:
    tp, pp = job["tp"], job["pp"]
    found: dict = {"families": {}}
    for family, path in job["models"].items():
        updater, architecture = updater_of(Path(path), tp, pp)
        read = tensor_reader(Path(path))
        exported = dict(gather_hf_weights(unwrap(updater.ddp), architecture))
        found["families"][family] = {
            "scores": scores(updater),
            "export_equal": all(torch.equal(tensor, read(name)) for name, tensor in exported.items()),
            "exported": sorted(exported),
        }
    updater, architecture = updater_of(Path(job["models"]["qwen3"]), tp, pp)
    losses, grads = {}, {}
    for form in ("tree", "flat", "split"):
        losses[form], grads[form] = gradients(updater, batch_rows(form))
    found["losses"] = losses
    found["gradient_differences"] = {form: largest_difference(grads[form], grads["flat"]) for form in ("tree", "split")}
    untouched = Path(job["checkpoint"] + ".untouched")
    saved = Path(job["checkpoint"])
    if rank == 0:
        saved.mkdir()
        untouched.mkdir()
    torch.distributed.barrier()
    checkpoint.save(updater, untouched)  # before the first update
    checkpoint.load(updater, untouched)
    found["adam"] = adam_losses(updater, 4)
    checkpoint.save(updater, saved)
    found["digest_saved"] = weights_digest(updater, architecture)
    undisturbed = adam_losses(updater, 2)
    checkpoint.load(updater, saved)
    found["digest_loaded"] = weights_digest(updater, architecture)
    found["resumed_equal"] = adam_losses(updater, 2) == undisturbed
    found["continued"] = undisturbed
    if job["other_checkpoint"]:
        checkpoint.load(updater, Path(job["other_checkpoint"]))
        found["continued_from_other_layout"] = adam_losses(updater, 2)
    found["reports"] = layout.reports_results()
    return found


def main() -> None:
    rank, world_size, job_path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    job = json.loads(job_path.read_text())
    prepare()
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(job_path.with_suffix(".store")), world_size)
    layout.initialize(ParallelLayout(tp=job["tp"], pp=job["pp"]), store, rank, world_size, seed=0)
    started = time.time()
    found = check(job, rank)
    found["seconds"] = time.time() - started
    job_path.with_suffix(f".rank{rank}").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
