"""`bench sync`: weights of a random model from Megatron ranks in one layout to engine workers in another, against a plain copy in memory.

Actor ranks are real Megatron models in processes of their own, without an optimizer. Engine workers keep tensors of the shapes an
engine keeps, so that "load" is one copy; what an engine makes of its weights beyond that is its own.
"""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_arpo.bench.memory import WatchesMemory
from megatron_arpo.bench.peers import ProcessPeers
from megatron_arpo.bench.plain_engine import PlainEngines, PlainWorker
from megatron_arpo.bench.report import MIN_PAIRS, BenchReport, Ratio, counted_ratio, paired_ratio, seconds_of
from megatron_arpo.config.actor import ActorSettings, LayoutSettings
from megatron_arpo.config.model import ModelSettings
from megatron_arpo.config.rollout import EngineSettings
from megatron_arpo.config.weights import WeightSettings
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.weights.peers import call
from megatron_arpo.weights.sender import SendsWeights, WeightSender
from megatron_arpo.weights.sync import WeightSync

_COPY_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Weights of actors in `layout` to `num_engines` engines of `tp` ranks each."""

    name: str
    layout: LayoutSettings
    num_engines: int
    tp: int


CASES = (
    Case(name="TP2xPP2 -> TP1", layout=LayoutSettings(tp=2, pp=2), num_engines=1, tp=1),
    Case(name="TP2 -> TP2", layout=LayoutSettings(tp=2), num_engines=1, tp=2),
    Case(name="TP1 -> 2 engines", layout=LayoutSettings(), num_engines=2, tp=1),
)
_TRANSPORTS: dict[str, dict[str, Any]] = {
    "shared memory": {"transport": "shared_memory"},
    "shared memory, two buckets": {"transport": "shared_memory", "keep_old": False},
    "broadcast, two buckets": {"transport": "broadcast", "keep_old": False},
}
_WEIGHED = ("shared memory", "shared memory, two buckets")
_NAMED = "shared memory"
"""The transport whose figures the named ratios are: the default one."""


class SyncActor(SendsWeights, WatchesMemory):
    """A rank of a Megatron model of made-up weights."""

    def __init__(self, rank: int, settings: LayoutSettings, architecture: Architecture, store: Path) -> None:
        from megatron_arpo.actor import layout
        from megatron_arpo.actor.device import current_device, prepare
        from megatron_arpo.actor.model import build_model, transformer_config, unwrap_all

        warnings.filterwarnings("ignore", module="megatron")
        prepare()
        torch.set_num_threads(1)
        self._rank = rank
        world_size = settings.world_size
        layout.initialize(settings, torch.distributed.FileStore(str(store), world_size), rank, world_size, seed=0)
        config = transformer_config(architecture, torch.bfloat16, ActorSettings(layout=settings, transformer="local"))
        config.perform_initialization = False
        chunks = build_model(config, architecture, "local")
        with torch.no_grad():
            for index, parameter in enumerate(parameter for chunk in chunks for parameter in chunk.parameters()):
                parameter.fill_(0.01 * (index + 1))  # also brings its pages into memory
        self._chunks = chunks
        self.offer_weights(WeightSender(unwrap_all(chunks), architecture), rank, current_device())

    def digest(self) -> float:
        """Sum of all values of this rank."""
        return float(sum(parameter.double().sum() for chunk in self._chunks for parameter in chunk.parameters()))

    def sync_store(self) -> tuple[str, int] | None:
        if self._rank:
            return None
        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return "127.0.0.1", self._store.port


class SyncWorker(PlainWorker, WatchesMemory):
    """An engine's worker whose memory is looked at."""

    def digest(self) -> float:
        return float(sum(tensor.double().sum() for tensor in self.tensors.values()))


def architecture_of(num_layers: int, quick: bool) -> Architecture:
    """The largest tensors, embedding and output, are the same at every number of layers."""
    sizes = dict(hidden_size=512, ffn_hidden_size=2048, vocab_size=32_000) if quick else dict(
        hidden_size=2048, ffn_hidden_size=8192, vocab_size=32_000
    )  # fmt: skip
    return Architecture(
        family="qwen2", num_layers=num_layers, num_heads=16, num_kv_heads=4, head_dim=sizes["hidden_size"] // 16, tied_embeddings=False,
        norm_eps=1e-6, rope_theta=1e6, max_positions=4096, qkv_bias=True, qk_norm=False, **sizes,
    )  # fmt: skip


def measure(quick: bool) -> BenchReport:
    """Every case through every transport, `MIN_PAIRS` syncs each beside a copy in memory; then memory at three sizes of the model."""
    bucket_bytes = (8 if quick else 128) * 2**20
    rows: list[dict[str, Any]] = []
    ratios: dict[str, Ratio] = {}
    copy_gb_s = _MemoryCopy()
    for case in CASES:
        with open_sides(case, architecture_of(8, quick)) as sides:
            for transport, settings in _TRANSPORTS.items():
                row, bandwidth, needed = measure_case(sides, case, transport, settings, bucket_bytes, copy_gb_s)
                rows.append(row)
                if transport == _NAMED:
                    suffix = "" if case is CASES[0] else f", {case.name}"
                    ratios["bandwidth_over_memcpy" + suffix] = bandwidth
                    ratios["bytes_over_needed" + suffix] = needed
    for num_layers in (4, 8, 16):
        with open_sides(CASES[0], architecture_of(num_layers, quick)) as sides:
            rows += [measure_memory(sides, CASES[0], transport, num_layers, bucket_bytes) for transport in _WEIGHED]
    settings = {"bucket MiB": bucket_bytes // 2**20, "dtype": "bfloat16", "verify": "checksum", "syncs": MIN_PAIRS}
    return BenchReport(bench="sync", settings=settings, rows=rows, ratios=ratios)


class _MemoryCopy:
    """GB/s of one thread that copies between two buffers which both are in memory."""

    def __init__(self) -> None:
        self._source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
        self._target = torch.empty_like(self._source)
        self._target.copy_(self._source)

    def __call__(self) -> float:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return 4 * _COPY_BYTES / seconds_of(lambda: [self._target.copy_(self._source) for _ in range(4)]) / 1e9
        finally:
            torch.set_num_threads(threads)


@dataclass(slots=True)
class Sides:
    """Both sides in processes that end with it."""

    actors: ProcessPeers
    workers: ProcessPeers
    _stack: ExitStack

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()


def open_sides(case: Case, architecture: Architecture) -> Sides:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ranks = [partial(SyncActor, rank, case.layout, architecture, folder / "store") for rank in range(case.layout.world_size)]
        actors = stack.enter_context(ProcessPeers(ranks, preload=["megatron_arpo.actor.model", "megatron_arpo.weights.sender"]))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        ranks = [partial(SyncWorker, rank, device) for _ in range(case.num_engines) for rank in range(case.tp)]
        workers = stack.enter_context(ProcessPeers(ranks))
        return Sides(actors, workers, stack.pop_all())


def open_sync(sides: Sides, case: Case, settings: dict[str, Any], bucket_bytes: int) -> WeightSync:
    weights = WeightSettings(verify="checksum", bucket_bytes=bucket_bytes, tries=1, **settings)
    engines = PlainEngines(sides.workers, case.num_engines, case.tp)
    return WeightSync(
        sides.actors, engines, weights, ModelSettings(path=Path("made-up")), EngineSettings(tp=case.tp), num_kv_heads=4, run_folder=Path()
    )


def measure_case(
    sides: Sides, case: Case, transport: str, settings: dict[str, Any], bucket_bytes: int, copy_gb_s: Callable[[], float]
) -> tuple[dict[str, Any], Ratio, Ratio]:
    with ExitStack() as stack:
        sync = open_sync(sides, case, settings, bucket_bytes)
        stack.callback(sync.close)
        sync.push(1, [])  # first touches of all pages
        found, bandwidths, copies = [], [], []
        for version in range(2, 2 + MIN_PAIRS):
            copies.append(copy_gb_s())
            found.append(sync.push(version, []))
            bandwidths.append(found[-1]["bytes"] / found[-1]["seconds"] / 1e9)
    kept = sum(call(sides.workers, "kept_bytes"))
    needed = sync.plan.model_bytes if settings["transport"] == "shared_memory" else kept
    row = _row(case.name, transport, sync) | {
        "seconds": statistics.median(one["seconds"] for one in found),
        "transport s": statistics.median(one["transport_seconds"] for one in found),
        "load s": statistics.median(one["load_seconds"] for one in found),
        "GB/s": statistics.median(bandwidths),
        "memory copy GB/s": statistics.median(copies),
    }
    return row, paired_ratio(bandwidths, copies), counted_ratio(sync.plan.moved_bytes, needed)


def measure_memory(sides: Sides, case: Case, transport: str, num_layers: int, bucket_bytes: int) -> dict[str, Any]:
    """Growth of the largest process of each side through whole syncs, engines' own tensors there before, and what lies in the host's
    shared memory."""
    settings = _TRANSPORTS[transport]
    first = open_sync(sides, case, settings, bucket_bytes)
    first.push(1, [])
    first.close()
    call(sides.actors, "disconnect")
    call(sides.workers, "disconnect_weights")
    for side in (sides.actors, sides.workers):
        call(side, "start_watch")
    sync = open_sync(sides, case, settings, bucket_bytes)
    sync.push(2, [])
    sync.push(3, [])
    row = _row(f"{case.name}, {num_layers} layers", f"{transport}: memory", sync) | {
        "actor MiB": max(call(sides.actors, "largest_growth")) / 2**20,
        "engine MiB": max(call(sides.workers, "largest_growth")) / 2**20,
        "host MiB": sync.host_bytes() / 2**20,
    }
    sync.close()
    return row


def _row(name: str, transport: str, sync: WeightSync) -> dict[str, Any]:
    return {
        "case": name,
        "transport": transport,
        "model GB": sync.plan.model_bytes / 1e9,
        "moved GB": sync.plan.moved_bytes / 1e9,
        "seconds": "",
        "transport s": "",
        "load s": "",
        "GB/s": "",
        "memory copy GB/s": "",
        "actor MiB": "",
        "engine MiB": "",
        "host MiB": "",
    }
