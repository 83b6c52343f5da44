"""The sync's driver over real transports, with both sides played by small stand-ins in threads."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_arpo.bench.peers import ThreadPeers
from megatron_arpo.bench.plain_engine import PlainEngines, PlainWorker
from megatron_arpo.config.model import ModelSettings
from megatron_arpo.config.rollout import EngineSettings
from megatron_arpo.config.weights import WeightSettings
from megatron_arpo.weights.sync import WeightMismatch, WeightSync
from tests.contract.weight_sides import RowActor

TENSORS = {
    "model.embed_tokens.weight": torch.arange(70.0).view(10, 7),
    "model.layers.0.self_attn.q_proj.weight": torch.ones(3, 5, dtype=torch.bfloat16),
    "model.norm.weight": torch.tensor([2.5]),
}


class ScoringWorker(PlainWorker):
    """Its scores are `error` off; `fail_in` raises in that method, once."""

    def __init__(self, error: float = 0.0, fail_in: str = "") -> None:
        super().__init__(0, "cpu")
        self._error, self.fail_in, self.abandoned = error, fail_in, 0

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        return [[-1.0 + self._error] * (len(ids) - 1) for ids in sequences]

    def check_buckets(self, version: int, checksums: Mapping[int, Any]) -> None:
        self._fail("check_buckets")
        super().check_buckets(version, checksums)

    def load_buckets(self, version: int, indices: Any) -> None:
        self._fail("load_buckets")
        super().load_buckets(version, indices)

    def abandon_weights(self) -> None:
        self.abandoned += 1

    def _fail(self, method: str) -> None:
        if self.fail_in == method:
            self.fail_in = ""
            raise ValueError(f"{method} failed")


@contextmanager
def sync_of(engine: ScoringWorker, dtype: str = "float32", **settings: Any) -> Iterator[tuple[WeightSync, ThreadPeers]]:
    actors, workers = ThreadPeers([RowActor(rank, 2, TENSORS) for rank in range(2)]), ThreadPeers([engine])
    model = ModelSettings(path=Path("m"), dtype=dtype)
    sync = WeightSync(
        actors, PlainEngines(workers, 1, 1), WeightSettings(**settings), model, EngineSettings(), num_kv_heads=1, run_folder=Path()
    )
    try:
        yield sync, actors
    finally:
        sync.close()
        actors.close()
        workers.close()


def in_shared_memory() -> set[Path]:
    return set(Path("/dev/shm").glob(f"megatron-arpo-{os.getpid()}-*"))


@pytest.mark.parametrize("keep_old", [True, False])
def test_the_engine_serves_what_the_actors_hold(keep_old: bool) -> None:
    before = in_shared_memory()
    engine = ScoringWorker()
    with sync_of(engine, keep_old=keep_old) as (sync, actors):
        values = sync.push(3, [[1, 2, 3]])
        assert engine.weight_version() == 3 == values["version"] and values["logprob_diff_max"] == 0.0
        assert values["bytes"] == sum(tensor.nbytes for tensor in TENSORS.values())
        assert sync.manifest.version == 3 and sorted(sync.manifest.names) == sorted(TENSORS)
        assert [len(of_tensor) for of_tensor in sync.manifest.checksums] == [
            2 if TENSORS[name].shape[0] > 1 else 1 for name in sync.manifest.names
        ], "a checksum for each rank's part"
        changed = {name: tensor + 1 for name, tensor in TENSORS.items()}
        for actor in actors.objects:
            actor.change(changed)
        sync.push(4, [[1, 2, 3]])
    assert all(torch.equal(engine.tensors[name], tensor) for name, tensor in changed.items())
    assert in_shared_memory() == before


@pytest.mark.parametrize(
    ("dtype", "off", "stops"), [("float32", 2e-3, True), ("float32", 5e-4, False), ("bfloat16", 0.03, True), ("bfloat16", 0.01, False)]
)
def test_an_engine_with_other_weights_stops_the_run(dtype: str, off: float, stops: bool) -> None:
    with sync_of(ScoringWorker(off), dtype) as (sync, _):
        if not stops:
            assert sync.push(1, [[1, 2, 3]])["logprob_diff_mean"] == pytest.approx(off)
            return
        with pytest.raises(WeightMismatch, match="the engine does not serve the actor's weights"):
            sync.push(1, [[1, 2, 3]])


def test_not_a_number_is_a_mismatch() -> None:
    with sync_of(ScoringWorker(float("nan"))) as (sync, _), pytest.raises(WeightMismatch, match="not a finite number"):
        sync.push(1, [[1, 2]])


@pytest.mark.parametrize("verify", ["off", "checksum"])
def test_verify_asks_for_no_more_than_it_says(verify: str) -> None:
    engine = ScoringWorker(error=9.0, fail_in="check_buckets" if verify == "off" else "")
    with sync_of(engine, verify=verify, tries=1) as (sync, _):
        assert "logprob_diff_max" not in sync.push(1, [[1, 2]])
        assert any(sync.manifest.checksums) == (verify == "checksum")


@pytest.mark.parametrize("keep_old", [True, False])
@pytest.mark.parametrize("method", ["check_buckets", "load_buckets"])
def test_a_failed_sync_is_tried_again(method: str, keep_old: bool, capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScoringWorker(fail_in=method)
    with sync_of(engine, keep_old=keep_old) as (sync, _):
        sync.push(1, [[1, 2]])
    assert engine.weight_version() == 1 and engine.abandoned == 1
    assert f"sync of weights version 1 failed ({method} failed); trying again" in "".join(capsys.readouterr())
    assert all(torch.equal(engine.tensors[name], tensor) for name, tensor in TENSORS.items())


def test_a_sync_that_fails_leaves_the_old_version() -> None:
    engine = ScoringWorker()
    with sync_of(engine, tries=1) as (sync, actors):
        sync.push(1, [[1, 2]])
        for actor in actors.objects:
            actor.change({name: tensor * 2 for name, tensor in TENSORS.items()})
        engine.fail_in = "check_buckets"
        with pytest.raises(ValueError, match="check_buckets failed"):
            sync.push(2, [[1, 2]])
        assert engine.weight_version() == 1 and engine.abandoned == 1
        assert all(torch.equal(engine.tensors[name], tensor) for name, tensor in TENSORS.items())


def test_a_changed_byte_is_found() -> None:
    engine = ScoringWorker()
    with sync_of(engine, tries=1) as (sync, actors):
        send = actors.objects[1].send_bucket

        def send_and_spoil(name: str, index: int, with_checksums: bool) -> list[str]:
            found = send(name, index, with_checksums)
            (path,) = [file for folder in in_shared_memory() for file in folder.glob("*.safetensors")]
            with path.open("r+b") as file:
                file.seek(-1, 2)
                last = file.read(1)
                file.seek(-1, 2)
                file.write(bytes([last[0] ^ 1]))
            return found

        actors.objects[1].send_bucket = send_and_spoil
        with pytest.raises(ValueError, match=r"q_proj.weight\[1:3, 0:5\] has another checksum than its actor wrote"):
            sync.push(1, [[1, 2]])
        assert engine.weight_version() == 0 and not engine.tensors


def test_weights_of_dead_runs_are_swept() -> None:
    left, alive = Path("/dev/shm/megatron-arpo-test-left"), Path("/dev/shm/megatron-arpo-test-alive")
    for folder in (left, alive):
        folder.mkdir()
        (folder / "slot-0").touch()
        (folder / ".lock").touch()
    try:
        with open(alive / ".lock") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            with sync_of(ScoringWorker()):
                assert not left.exists() and (alive / "slot-0").exists()
    finally:
        shutil.rmtree(alive)


def test_shared_memory_that_is_full_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def no_room(*_arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    before = in_shared_memory()
    with pytest.raises(ValueError, match=r"has no room for \d+ bytes of weights; make it larger"), sync_of(ScoringWorker()):
        raise AssertionError("must not start")
    assert in_shared_memory() == before
