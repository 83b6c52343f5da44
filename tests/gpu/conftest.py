"""Checks that need a card: without one they are skipped, or run in small with MEGATRON_ARPO_GPU_CHECKS=cpu-dry-run, which finds
wrong names and shapes and says nothing of any card. tools/gpu_check.sh runs them, each file in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.rows import Recorder

HERE = Path(__file__).parent
DRY_RUN = os.environ.get("MEGATRON_ARPO_GPU_CHECKS") == "cpu-dry-run"
ON_CARD = torch.cuda.is_available() and not DRY_RUN
_RECORDER = pytest.StashKey[Recorder]()


def pytest_configure(config: pytest.Config) -> None:
    rows = os.environ.get("MEGATRON_ARPO_GPU_ROWS")
    config.stash[_RECORDER] = Recorder(Path(rows) if rows else Path(os.devnull), dry_run=DRY_RUN)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not ON_CARD and not DRY_RUN:
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """A check that breaks off is a row too."""
    report = yield
    if report.failed and call.when != "teardown" and HERE in item.path.parents:
        error = call.excinfo.value
        said = (str(error).splitlines() or [""])[0]
        item.config.stash[_RECORDER].broken(item.name, f"{type(error).__name__}: {said}"[:300])
    return report


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Iterator[Recorder]:
    recorder = request.config.stash[_RECORDER]
    before = len(recorder.failed)
    yield recorder
    assert recorder.failed[before:] == [], "outside of their bounds"


@pytest.fixture(scope="session")
def device() -> Iterator[torch.device]:
    """Where the checks run, with the process group of one rank."""
    from megatron_arpo.actor.device import current_device
    from megatron_arpo.bench.actor import start_single_rank

    start_single_rank()
    yield current_device()
    torch.distributed.destroy_process_group()
