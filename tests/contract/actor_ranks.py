"""What every rank of tests/contract/layouts.py does: one launch a layout, all checks in it, results in files."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from megatron_arpo.actor import checkpoint, layout  # noqa: E402
from megatron_arpo.actor.device import prepare  # noqa: E402
from megatron_arpo.actor.model import build_model, transformer_config, unwrap_all  # noqa: E402
from megatron_arpo.actor.policy import policy_step  # noqa: E402
from megatron_arpo.actor.reference import ReferencePolicy  # noqa: E402
from megatron_arpo.actor.target_logprobs import LogitSettings  # noqa: E402
from megatron_arpo.actor.update import Updater  # noqa: E402
from megatron_arpo.batch.flat import pack_sequences  # noqa: E402
from megatron_arpo.batch.padding import FILLER  # noqa: E402
from megatron_arpo.batch.schedule import RowCost, assign_rows  # noqa: E402
from megatron_arpo.config.actor import ActorSettings, OptimizerSettings  # noqa: E402
from megatron_arpo.config.algorithm import LossSettings  # noqa: E402
from megatron_arpo.engine.buckets import Bucket, Fragment, tensor_at  # noqa: E402
from megatron_arpo.families.architecture import read_architecture  # noqa: E402
from megatron_arpo.types import PackedRow, Region  # noqa: E402
from megatron_arpo.weights.fp8 import SCALE_SUFFIX, dequantize  # noqa: E402
from megatron_arpo.weights.megatron import load_hf_weights  # noqa: E402
from megatron_arpo.weights.plan import make_plan  # noqa: E402
from megatron_arpo.weights.safetensors_folder import tensor_reader  # noqa: E402
from megatron_arpo.weights.sender import WeightSender  # noqa: E402
from tests.gathered import gather_hf_weights  # noqa: E402
from tests.unit.trees import flat_rows, joined, random_tree, tree_rows  # noqa: E402

COST = RowCost(per_token=1.0, per_key=0.01)
SEEDS = (21, 22, 23)
ROW_TOKENS = 64  # several rows, one more than two ranks share evenly
ADAM = OptimizerSettings(lr=1e-3, schedule="linear", warmup_updates=2)
SGD = OptimizerSettings(kind="sgd", lr=0.3, weight_decay=0.0, clip_grad=1e9)  # clips nothing, but reports the norm
GENTLE_SGD = SGD.model_copy(update={"lr": 0.03})
NARROW = {"clip_low": 0.01, "clip_high": 0.01, "dual_clip": 1.01}
"""Clips at work without a large update between the two mini-batches, which would amplify rounding."""
LOSSES = {
    "token-mean": ("soft", LossSettings(**NARROW)),
    "seq-mean-token-mean, hard": ("hard", LossSettings(**NARROW, aggregation="seq-mean-token-mean")),
    "seq-mean-token-sum, no dual clip, no importance weights": (
        "soft",
        LossSettings(**NARROW | {"dual_clip": None}, aggregation="seq-mean-token-sum", importance_cap=None),
    ),
    "AEPO clipping, entropy-aware advantage": ("soft", LossSettings(**NARROW, aepo_clipping=True, entropy_advantage=0.2)),
    "KL": ("soft", LossSettings(**NARROW, kl_coef=0.1)),
    "all": (
        "hard",
        LossSettings(
            **NARROW, aggregation="seq-mean-token-mean", aepo_clipping=True, entropy_advantage=0.4, kl_coef=0.1, importance_cap=1.2
        ),
    ),
}


class Actor:
    """One rank's part of a model from a Hugging Face folder, and what the checks ask of it."""

    def __init__(self, model_path: Path, actor: ActorSettings) -> None:
        self.architecture = read_architecture(model_path)
        self.architecture.check_layout(actor.layout)
        self.read = tensor_reader(model_path)
        config = transformer_config(self.architecture, torch.float32, actor)
        chunks = build_model(config, self.architecture, "local")
        load_hf_weights(unwrap_all(chunks), self.architecture, self.read)
        logits = LogitSettings(
            vocab_size=self.architecture.vocab_size,
            chunk_tokens=actor.logits_chunk_tokens,
            sequence_parallel=actor.layout.sequence_parallel,
        )
        self.updater = Updater(chunks, config, logits, actor.optimizer, num_updates=40)
        self.vp_groups = actor.layout.micro_batch_multiple

    @property
    def models(self) -> list:
        return unwrap_all(self.updater.chunks)

    def load(self, factor: float = 1.0) -> None:
        load_hf_weights(self.models, self.architecture, lambda name: self.read(name) * factor)

    def weights(self) -> dict[str, torch.Tensor]:
        return {one.name: one.tensor.clone() for one in gather_hf_weights(self.models, self.architecture) if one.written_here}

    def gradients(self) -> dict[str, torch.Tensor]:
        found = gather_hf_weights(self.models, self.architecture, lambda parameter: parameter.main_grad)
        return {one.name: one.tensor.clone() for one in found if one.written_here}

    def mine(self, rows: list[PackedRow]) -> list[PackedRow]:
        group = parallel_state.get_data_parallel_group()
        return assign_rows(rows, group.size(), self.vp_groups, COST)[group.rank()]

    def step(self, mini_batches: list[list[PackedRow]], loss: LossSettings, reference: ReferencePolicy | None = None) -> list[dict]:
        return policy_step(self.updater, reference, [self.mine(rows) for rows in mini_batches], loss, temperature=0.9)


def held_pieces(actor: Actor) -> tuple[bool, list[tuple]]:
    """Whether the pieces that a weight sync sends are those of the Hugging Face tensors, and which they are."""
    sender = WeightSender(actor.models, actor.architecture)
    equal = True
    for held in sender.held(fp8=False):
        target = torch.empty(held.region.extent)
        sender.piece(held.name).copy_to(target, held.region.within(held.region))
        equal &= torch.equal(target, held.region.of(actor.read(held.name)))
    return equal, [(held.name, held.dtype, held.shape, held.region.start, held.region.extent) for held in sender.held(fp8=False)]


def fp8_error(actor: Actor) -> float:
    """What a sync in FP8 brings: largest difference of a tensor, relative to its largest value."""
    sender = WeightSender(actor.models, actor.architecture)
    plan = make_plan([sender.held(fp8=True)], [lambda _name, shape: Region.whole(shape)], 2**16)
    found: dict[str, torch.Tensor] = {}
    for bucket in plan.buckets:
        buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        outbox = SimpleNamespace(target=partial(_view_of, buffer), send=lambda _bucket: None)
        assert len(sender.send(outbox, bucket, 0, with_checksums=True)) == len(bucket.fragments)
        found |= {place.name: tensor_at(buffer, place) for place in bucket.places}
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in found.values())
    worst = 0.0
    for name, tensor in found.items():
        if not name.endswith(SCALE_SUFFIX):
            whole = dequantize(tensor, found[name + SCALE_SUFFIX]) if name + SCALE_SUFFIX in found else tensor
            expected = actor.read(name)
            worst = max(worst, float((whole - expected).abs().max() / expected.abs().max()))
    return worst


def _view_of(buffer: torch.Tensor, bucket: Bucket, fragment: Fragment) -> torch.Tensor:
    return bucket.fragment_view(buffer, fragment)


def scores(actor: Actor) -> list[float]:
    """Log-probs of three sequences, as tests/contract/layouts.py has transformers compute them."""
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 300, (length,), generator=generator).tolist() for length in (7, 19, 30)]
    packed = pack_sequences([(ids, [1] * len(ids)) for ids in sequences], 1.0, 40)
    rows = actor.updater.tensors(packed + [FILLER] * (-len(packed) % actor.vp_groups))
    found = []
    for row, (logprobs_N, _) in zip(rows, actor.updater.logprobs(rows, temperature=1.0), strict=False):
        whole = torch.zeros(row.num_targets)
        whole[row.target_index_N] = logprobs_N
        torch.distributed.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        found.extend(whole.tolist())
    return found


def trees() -> list:
    return [random_tree(seed, num_initial=4, prompt_id=str(seed)) for seed in SEEDS]


def parity(actor: Actor) -> tuple[list[list[float]], dict[str, dict[str, torch.Tensor]]]:
    """[loss, gradient norm] of two SGD updates, the gradients of the first and the parameters after the second."""
    rows = tree_rows(trees(), LossSettings().aggregation, "soft", ROW_TOKENS)
    first = actor.step([rows], LossSettings())
    gradients = actor.gradients()
    second = actor.step([rows], LossSettings())
    return [[sums["loss"], sums["grad_norm_max"]] for sums in first + second if sums], {
        "gradients": gradients,
        "parameters": actor.weights(),
    }


def tree_against_flat(actor: Actor) -> dict[str, dict[str, dict]]:
    """Loss, clipped tokens and largest gradient difference to the flat batch, for each loss and each form of the batch.

    Two mini-batches: the second is against a policy that the first has moved, so that clipping is at work.
    """
    actor.load(factor=1.1)
    reference = ReferencePolicy(actor.updater.chunks)
    found: dict[str, dict[str, dict]] = {}
    for name, (attribution, loss) in LOSSES.items():
        found[name] = {}
        for form in ("flat", "tree", "split"):
            actor.load()
            chosen = trees()
            batches = [chosen[:1], chosen[1:]]
            if form == "flat":
                rows = [[joined(flat_rows(batch, loss.aggregation, attribution))] for batch in batches]
            else:
                rows = [tree_rows(batch, loss.aggregation, attribution, 40 if form == "split" else 4096) for batch in batches]
            first, second = actor.step(rows, loss, reference)
            gradients = actor.gradients()
            if form == "flat":
                expected = gradients
            found[name][form] = {
                "losses": [first.get("loss", 0.0), second.get("loss", 0.0)],
                "clipped": second.get("clipped", 0.0),
                "difference": largest_difference(gradients, expected),
            }
    actor.load()
    return found


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Per tensor, relative to the tensor's largest value."""
    return max((float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-12)) for name in theirs), default=0.0)


def adam_losses(actor: Actor, num_updates: int) -> list[list[float]]:
    rows = tree_rows(trees(), "token-mean", "soft", ROW_TOKENS)
    found = []
    for _ in range(num_updates):
        (sums,) = actor.step([rows], LossSettings())
        found.append([sums["loss"], sums["grad_norm_max"]] if sums else [])
    return found


def digest(actor: Actor) -> dict[str, float]:
    return {name: float(tensor.double().sum()) for name, tensor in actor.weights().items()}


def checkpoints(actor: Actor, job: dict, rank: int) -> dict:
    untouched, saved = Path(job["checkpoint"] + ".untouched"), Path(job["checkpoint"])
    if rank == 0:
        saved.mkdir()
        untouched.mkdir()
    torch.distributed.barrier()
    checkpoint.save(actor.updater, untouched)  # before the first update
    checkpoint.load(actor.updater, untouched)
    found: dict = {"adam": adam_losses(actor, 20)}
    checkpoint.save(actor.updater, saved)
    found["digest_saved"] = digest(actor)
    found["continued"] = adam_losses(actor, 2)
    checkpoint.load(actor.updater, saved)
    found["digest_loaded"] = digest(actor)
    found["resumed_equal"] = adam_losses(actor, 2) == found["continued"]
    if job["other_checkpoint"]:
        checkpoint.load(actor.updater, Path(job["other_checkpoint"]))
        found["continued_from_other_layout"] = adam_losses(actor, 2)
    return found


def check(job: dict, rank: int) -> tuple[dict, dict[str, dict]]:
    found: dict = {
        "reports": layout.reports_results(),
        "scores": {},
        "export_equal": {},
        "exported": {},
        "parity": {},
        "pieces": {},
        "pieces_equal": {},
    }
    tensors: dict[str, dict] = {}
    options = {"layout": job["layout"], "recompute": job["recompute"], "logits_chunk_tokens": 7}
    for family in job["families"]:
        actor = Actor(Path(job["models"][family]), ActorSettings(**options, optimizer=SGD))
        found["scores"][family] = scores(actor)
        exported = actor.weights()
        found["export_equal"][family] = all(torch.equal(tensor, actor.read(name)) for name, tensor in exported.items())
        found["exported"][family] = sorted(exported)
        found["pieces_equal"][family], found["pieces"][family] = held_pieces(actor)
        if len(job["layout"]) == 0 and not actor.architecture.experts:
            found["fp8_error"] = fp8_error(actor)
        found["parity"][family], tensors[family] = parity(actor)
        if family in job["tree_families"]:
            gentle = Actor(Path(job["models"][family]), ActorSettings(**options, optimizer=GENTLE_SGD))
            found.setdefault("trees", {})[family] = tree_against_flat(gentle)
    family = job["families"][0]
    found["checkpoints"] = checkpoints(Actor(Path(job["models"][family]), ActorSettings(**options, optimizer=ADAM)), job, rank)
    return found, tensors


def join_ranks(rank: int, world_size: int, job_path: Path, log_path: Path) -> dict:
    """The job, once this process is one of its ranks; what it prints goes to `log_path`."""
    log = log_path.open("w")
    os.dup2(log.fileno(), sys.stderr.fileno())
    faulthandler.enable(log)
    job = json.loads(job_path.read_text())
    prepare()
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(job_path.with_suffix(".store")), world_size)
    layout.initialize(ActorSettings(layout=job["layout"]).layout, store, rank, world_size, seed=0)
    return job


def leave_ranks(rank: int, job_path: Path, found: dict) -> None:
    job_path.with_suffix(f".rank{rank}").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_rank(rank: int, world_size: int, job_path: Path, log_path: Path) -> None:
    """The whole of one process."""
    job = join_ranks(rank, world_size, job_path, log_path)
    found, tensors = check(job, rank)
    torch.save(tensors, job_path.with_suffix(f".rank{rank}.pt"))
    leave_ranks(rank, job_path, found)
