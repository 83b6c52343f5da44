"""The Megatron actor is the same model in every layout: log-probs as transformers gives them, gradients and updates as in one
process, tree batches equal to flat batches, and checkpoints that go on in the same and in another layout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_arpo.types import Region
from megatron_arpo.weights.plan import HeldPiece, make_plan
from tests.contract.actor_ranks import LOSSES
from tests.contract.layouts import CHECKPOINT_FROM, LAYOUTS, TREES_IN, LayoutRuns, families_of, parity, reference_scores

pytestmark = pytest.mark.slow
EVERY = [(name, family) for name in LAYOUTS for family in families_of(name)]
SPLIT = [pair for pair in EVERY if pair[0] != "1"]
TREES = [(name, family, loss) for name, families in TREES_IN.items() for family in families for loss in LOSSES]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> LayoutRuns:
    return LayoutRuns(tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="module")
def references(runs: LayoutRuns) -> dict[str, list[float]]:
    return {family: reference_scores(runs.model(family)) for family in families_of("1")}


@pytest.mark.parametrize(("name", "family"), EVERY)
def test_logprobs_are_those_of_transformers(runs: LayoutRuns, references, name: str, family: str) -> None:
    found = next(rank for rank in runs.ranks(name) if rank["reports"])["scores"][family]
    assert found == pytest.approx(references[family], abs=1e-4)


@pytest.mark.parametrize(("name", "family"), EVERY)
def test_export_gives_back_the_same_bytes(runs: LayoutRuns, name: str, family: str) -> None:
    ranks = runs.ranks(name)
    assert all(rank["export_equal"][family] for rank in ranks)
    names = [tensor for rank in ranks for tensor in rank["exported"][family]]
    assert sorted(names) == runs.ranks("1")[0]["exported"][family]


@pytest.mark.parametrize(("name", "family"), EVERY)
def test_ranks_hold_what_a_sync_sends(runs: LayoutRuns, name: str, family: str) -> None:
    """The pieces of every rank are those of the Hugging Face tensors, and together the whole model, each byte planned once."""
    ranks = runs.ranks(name)
    assert all(rank["pieces_equal"][family] for rank in ranks)
    held = [
        [
            HeldPiece(name=tensor, dtype=dtype, shape=tuple(shape), region=Region(tuple(start), tuple(extent)))
            for tensor, dtype, shape, start, extent in rank["pieces"][family]
        ]
        for rank in ranks
    ]
    plan = make_plan(held, [lambda _name, shape: Region.whole(shape)], 2**16)
    assert sorted(place.name for place in plan.tensors()) == runs.ranks("1")[0]["exported"][family]
    assert plan.moved_bytes == plan.model_bytes


def test_a_sync_in_fp8_brings_the_weights_within_rounding(runs: LayoutRuns) -> None:
    assert 1e-4 < runs.ranks("1")[0]["fp8_error"] < 1 / 16


@pytest.mark.parametrize(("name", "family"), SPLIT)
def test_updates_are_those_of_one_process(runs: LayoutRuns, name: str, family: str) -> None:
    """Loss, global gradient norm, every gradient and every parameter after two SGD updates."""
    found = parity(runs, name, family)
    assert found["gradients"] < 1e-5 and found["parameters"] < 1e-5, found
    assert found["loss"] < 1e-5 and found["norm"] < 1e-5, found


@pytest.mark.parametrize(("name", "family", "loss"), TREES)
def test_tree_and_split_rows_are_the_flat_batch(runs: LayoutRuns, name: str, family: str, loss: str) -> None:
    """Loss and every gradient, for every aggregation, attribution, clipping, KL and weighting."""
    ranks = [rank["trees"][family][loss] for rank in runs.ranks(name)]
    parts = [rank["trees"][family][loss] for rank in runs.ranks(name) if rank["reports"]]
    losses = {form: [sum(part[form]["losses"][index] for part in parts) for index in range(2)] for form in ("flat", "tree", "split")}
    for form in ("tree", "split"):
        assert max(rank[form]["difference"] for rank in ranks) < 1e-5
        assert losses[form] == pytest.approx(losses["flat"], rel=1e-5, abs=1e-5)  # token losses of size 1 cancel
    assert sum(part["flat"]["clipped"] for part in parts) >= 5


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "1"])
def test_adam_runs_as_in_one_process(runs: LayoutRuns, name: str) -> None:
    """By loss over 20 updates: Adam amplifies rounding where gradients vanish."""
    if families_of(name)[0] != families_of("1")[0]:
        pytest.skip("one process trains the dense model; the expert model is compared by SGD")
    one = runs.ranks("1")[0]["checkpoints"]["adam"]
    parts = [rank["checkpoints"]["adam"] for rank in runs.ranks(name) if rank["reports"]]
    for update, (loss, norm) in enumerate(one):
        assert sum(part[update][0] for part in parts) == pytest.approx(loss, rel=1e-3, abs=1e-4)
        assert all(part[update][1] == pytest.approx(norm, rel=1e-3) for part in parts)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_resumed_run_goes_on_bit_for_bit(runs: LayoutRuns, name: str) -> None:
    for rank in runs.ranks(name):
        assert rank["checkpoints"]["digest_saved"] == rank["checkpoints"]["digest_loaded"]
        assert rank["checkpoints"]["resumed_equal"]


@pytest.mark.parametrize(("name", "other"), CHECKPOINT_FROM.items())
def test_a_checkpoint_goes_on_in_another_layout(runs: LayoutRuns, name: str, other: str) -> None:
    expected = [
        [sum(part[update][0] for part in parts), parts[0][update][1]]
        for parts in [[rank["checkpoints"]["continued"] for rank in runs.ranks(other) if rank["reports"]]]
        for update in range(2)
    ]
    parts = [rank["checkpoints"]["continued_from_other_layout"] for rank in runs.ranks(name) if rank["reports"]]
    for update, (loss, norm) in enumerate(expected):
        assert sum(part[update][0] for part in parts) == pytest.approx(loss, rel=2e-4, abs=2e-5)
        assert parts[0][update][1] == pytest.approx(norm, rel=2e-4)


@pytest.mark.parametrize(("family", "num_examples"), [("qwen2", 25), ("qwen3_moe", 10)])
def test_random_trees_are_the_flat_batch(family: str, num_examples: int) -> None:
    """Drawn trees, limits, attributions and losses."""
    command = [sys.executable, "-m", "tests.contract.tree_exactness", family, str(num_examples)]
    found = subprocess.run(
        command, cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr[-3000:]
