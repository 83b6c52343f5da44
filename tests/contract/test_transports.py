"""What every transport must do: bring each engine worker the parts it needs, between processes, version after version."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_arpo.bench.peers import ProcessPeers
from megatron_arpo.bench.plain_engine import PlainEngines, PlainWorker
from megatron_arpo.config.model import ModelSettings
from megatron_arpo.config.rollout import EngineSettings
from megatron_arpo.config.weights import WeightSettings
from megatron_arpo.engine.slices import kept_region
from megatron_arpo.weights.peers import call
from megatron_arpo.weights.sync import WeightSync
from tests.contract.weight_sides import RowActor

pytestmark = pytest.mark.slow
NUM_KV_HEADS = 2
TRANSPORTS = {
    "shared memory": {"transport": "shared_memory"},
    "shared memory, two buckets": {"transport": "shared_memory", "keep_old": False},
    "broadcast": {"transport": "broadcast", "timeout_s": 60.0},
    "broadcast, two buckets": {"transport": "broadcast", "keep_old": False, "timeout_s": 60.0},
    "opened buffers, two buckets": {"transport": "cuda_ipc", "keep_old": False},  # host memory in place of a GPU's
    "folder": {"transport": "checkpoint"},
}


def model(factor: float) -> dict[str, torch.Tensor]:
    """Three buckets of 1 MiB and one of a layer that is larger."""
    shapes = {
        "model.embed_tokens.weight": (501, 256),
        **{
            f"model.layers.{layer}.{name}": shape
            for layer in range(2)
            for name, shape in {
                "input_layernorm.weight": (256,), "self_attn.q_proj.weight": (256, 256), "self_attn.q_proj.bias": (256,),
                "self_attn.k_proj.weight": (64, 256), "self_attn.v_proj.weight": (64, 256), "self_attn.o_proj.weight": (256, 256),
                "mlp.gate_proj.weight": (640, 256), "mlp.up_proj.weight": (640, 256), "mlp.down_proj.weight": (256, 640),
            }.items()
        },
        "lm_head.weight": (501, 256),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) * factor for name, shape in shapes.items()}


@contextmanager
def sides(num_actors: int, num_engines: int, tp: int, folder: Path, settings: dict[str, Any]) -> Iterator[tuple]:
    if settings["transport"] == "checkpoint":
        settings = settings | {"folder": folder / "weights"}
    with ExitStack() as stack:
        actors = stack.enter_context(ProcessPeers([partial(RowActor, rank, num_actors, model(1.0)) for rank in range(num_actors)]))
        workers = stack.enter_context(ProcessPeers([partial(PlainWorker, rank, "cpu") for _ in range(num_engines) for rank in range(tp)]))
        engines = PlainEngines(workers, num_engines, tp)
        (folder / "config.json").write_text("{}")
        weights = WeightSettings(verify="checksum", bucket_bytes=2**20, **settings)
        sync = WeightSync(
            actors, engines, weights, ModelSettings(path=folder), EngineSettings(tp=tp), num_kv_heads=NUM_KV_HEADS, run_folder=folder
        )
        stack.callback(sync.close)
        yield sync, actors, workers, engines


def assert_kept(workers: ProcessPeers, tp: int, tensors: dict[str, torch.Tensor]) -> None:
    for worker, kept in enumerate(call(workers, "kept")):
        assert kept.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(kept[name], kept_region(name, tuple(tensor.shape), NUM_KV_HEADS, tp, worker % tp).of(tensor)), name


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize(("num_actors", "num_engines", "tp"), [(2, 1, 2), (2, 2, 1)], ids=["one engine of two ranks", "two engines"])
def test_every_worker_keeps_its_part_of_every_version(name: str, num_actors: int, num_engines: int, tp: int, tmp_path: Path) -> None:
    with sides(num_actors, num_engines, tp, tmp_path, TRANSPORTS[name]) as (sync, actors, workers, engines):
        assert len(sync.plan.buckets) >= 4
        for version, factor in ((1, 1.0), (2, 2.5), (3, -1.0)):
            call(actors, "change", model(factor))
            values = sync.push(version, [])
            assert call(engines, "weight_version") == [version] * num_engines
            assert_kept(workers, tp, model(factor))
        whole = sum(tensor.nbytes for tensor in model(1.0).values())
        copies = num_engines if TRANSPORTS[name]["transport"] in ("broadcast", "cuda_ipc") else 1
        assert values["bytes"] == pytest.approx(whole * copies, rel=0.01), "one row of norms and biases is needed twice"


class SpoiledOnce(PlainWorker):
    """Says once that a bucket is not as it was sent."""

    spoiled = False

    def check_buckets(self, version: int, checksums: Any) -> None:
        super().check_buckets(version, checksums)
        if version == 2 and not self.spoiled:
            self.spoiled = True
            raise ValueError("spoiled")


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_sync_that_fails_at_the_engine_is_tried_again_at_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.contract.test_transports.PlainWorker", SpoiledOnce)
    with sides(2, 1, 1, tmp_path, TRANSPORTS[name]) as (sync, actors, workers, engines):
        sync.push(1, [])
        call(actors, "change", model(2.0))
        started = time.monotonic()
        sync.push(2, [])
        assert time.monotonic() - started < 5
        assert call(engines, "weight_version") == [2]
        assert_kept(workers, 1, model(2.0))


@pytest.mark.parametrize("name", ["shared memory", "broadcast"])
def test_an_actor_that_dies_in_a_sync_leaves_the_old_version(name: str, tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    with sides(2, 1, 1, tmp_path, TRANSPORTS[name] | {"tries": 1}) as (sync, actors, workers, engines):
        sync.push(1, [])
        call(actors, "change", model(2.0))
        os.kill(actors.processes[1].pid, signal.SIGKILL)
        actors.processes[1].join()
        with pytest.raises((ValueError, RuntimeError, OSError)):
            sync.push(2, [])
        assert call(engines, "weight_version") == [1]
        assert_kept(workers, 1, model(1.0))
    assert set(Path("/dev/shm").iterdir()) <= before


def test_the_folder_is_one_that_transformers_would_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    with sides(2, 1, 1, tmp_path, TRANSPORTS["folder"]) as (sync, _, _, _):
        sync.push(1, [])
        found = {}
        (index,) = tmp_path.rglob("model.safetensors.index.json")
        for shard in set(json.loads(index.read_text())["weight_map"].values()):
            found |= load_file(index.parent / shard)
        assert json.loads((index.parent / "config.json").read_text())["torch_dtype"] == "float32"
        assert found.keys() == model(1.0).keys() and all(torch.equal(found[name], tensor) for name, tensor in model(1.0).items())
