"""The sync between actor and engine, with both sides played by small stand-ins that hold real tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_arpo.config.model import ModelSettings
from megatron_arpo.config.weights import WeightSettings
from megatron_arpo.engine.weight_buffer import check_buffer, checksum, mapped, places_of, tensor_at
from megatron_arpo.run.weight_sync import WeightMismatch, WeightSync

TENSORS = {"a": torch.arange(7.0), "b": torch.ones(3, 5, dtype=torch.bfloat16), "c": torch.tensor([[2.5]])}


class TwoSides:
    """Two actor ranks that each write a part, and an engine that reads the file; `engine_error` is what its scores are off by."""

    def __init__(self, engine_error: float = 0.0) -> None:
        self._parts = [dict(list(TENSORS.items())[:2]), dict(list(TENSORS.items())[2:])]
        self._engine_error = engine_error
        self.served: dict[str, torch.Tensor] = {}

    def on_actors(self, method: str, *arguments: Any) -> list[Any]:
        match method:
            case "weight_shapes":
                return [[(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in part.items()] for part in self._parts]
            case "write_weights":
                path, places = arguments
                where = {place.name: place for place in places}
                with mapped(path) as buffer:
                    for name, tensor in TENSORS.items():
                        tensor_at(buffer, where[name]).copy_(tensor)
                return [{name: checksum(tensor) for name, tensor in part.items()} for part in self._parts]
            case "score":
                return [[], [[-1.0] * (len(ids) - 1) for ids in arguments[0]]]
        raise AssertionError(method)

    def on_engine(self, method: str, *arguments: Any) -> Any:
        match method:
            case "load_weights":
                path, manifest = arguments
                with mapped(Path(path)) as buffer:
                    check_buffer(buffer, manifest)
                    self.served = {place.name: tensor_at(buffer, place).clone() for place in places_of(manifest)}
                return None
            case "score":
                return [[-1.0 + self._engine_error] * (len(ids) - 1) for ids in arguments[0]]
        raise AssertionError(method)


def sync_of(sides: TwoSides, dtype: str = "float32", **settings: Any) -> WeightSync:
    return WeightSync(sides, WeightSettings(**settings), ModelSettings(path=Path("m"), dtype=dtype))


def test_the_engine_serves_what_the_actors_wrote() -> None:
    before = set(Path("/dev/shm").iterdir())
    sides = TwoSides()
    values = sync_of(sides).push(3, [[1, 2, 3]])
    assert sides.served.keys() == TENSORS.keys()
    assert all(torch.equal(sides.served[name], tensor) for name, tensor in TENSORS.items())
    assert values["version"] == 3 and values["logprob_diff_max"] == 0.0
    assert set(Path("/dev/shm").iterdir()) == before


@pytest.mark.parametrize(
    ("dtype", "off", "stops"), [("float32", 2e-3, True), ("float32", 5e-4, False), ("bfloat16", 0.03, True), ("bfloat16", 0.01, False)]
)
def test_an_engine_with_other_weights_stops_the_run(dtype: str, off: float, stops: bool) -> None:
    sync = sync_of(TwoSides(engine_error=off), dtype)
    if not stops:
        assert sync.push(1, [[1, 2, 3]])["logprob_diff_mean"] == pytest.approx(off)
        return
    with pytest.raises(WeightMismatch, match="the engine does not serve the actor's weights"):
        sync.push(1, [[1, 2, 3]])


def test_not_a_number_is_a_mismatch() -> None:
    with pytest.raises(WeightMismatch):
        sync_of(TwoSides(engine_error=float("nan"))).push(1, [[1, 2]])


def test_one_score_that_is_not_a_number_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = TwoSides()
    monkeypatch.setattr(sides, "on_engine", lambda method, *_: [[-1.0, float("nan")]] if method == "score" else None)
    with pytest.raises(WeightMismatch, match="not a finite number"):
        sync_of(sides).push(1, [[1, 2, 3]])


def test_files_of_dead_runs_are_swept() -> None:
    left, alive = Path("/dev/shm/megatron-arpo-4194999-v3"), Path("/dev/shm/megatron-arpo-1-v3")
    left.touch()
    alive.touch()
    try:
        sync_of(TwoSides())
        assert not left.exists() and alive.exists()
    finally:
        alive.unlink()


def test_a_changed_byte_is_found() -> None:
    sides = TwoSides()
    path, manifest = sync_of(sides).write(1)
    try:
        with mapped(path) as buffer:
            buffer[manifest.offsets[1] + 3] ^= 1
        with pytest.raises(ValueError, match="b has another checksum"):
            sides.on_engine("load_weights", str(path), manifest)
    finally:
        path.unlink()


def test_a_short_file_is_found() -> None:
    sides = TwoSides()
    path, manifest = sync_of(sides).write(1)
    try:
        with mapped(path) as buffer, pytest.raises(ValueError, match="the file is cut off"):
            check_buffer(buffer[:-1], manifest)
    finally:
        path.unlink()
