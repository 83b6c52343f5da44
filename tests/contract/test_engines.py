"""What every engine must do, the scripted one and the real vLLM alike."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_arpo.bench.peers import ThreadPeers
from megatron_arpo.config.model import ModelSettings
from megatron_arpo.config.rollout import EngineSettings
from megatron_arpo.config.weights import WeightSettings
from megatron_arpo.engine.base import Engine, EngineDied, GenerateRequest
from megatron_arpo.engine.scripted import ScriptedEngine, ScriptedReply
from megatron_arpo.types import Completion, VersionRun, join_runs
from megatron_arpo.weights.sync import WeightSync
from tests.contract.weight_sides import EnginePeers, RowActor

ROOT = Path(__file__).parents[2]
PROMPT = tuple(range(20, 60))
STOPPING_PROMPT = (1, 2, 3)
"""What the scripted engine answers with a tool call."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines") / "task"
    subprocess.run(
        [sys.executable, str(ROOT / "examples/quickstart/make_task.py"), "--out", str(folder), "--num-demonstrations", "64",
         "--num-train", "16", "--num-valid", "8"], check=True, capture_output=True,
    )  # fmt: skip
    return folder / "model"


def weights_of(model: Path, factor: float) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor * factor for name, tensor in load_file(model / "model.safetensors").items()}


@asynccontextmanager
async def syncing(
    engine: Engine, tensors: dict[str, torch.Tensor], tp: int = 1, **settings: Any
) -> AsyncIterator[tuple[WeightSync, list[RowActor]]]:
    """A sync of two actor ranks with the engine, to be pushed in another thread."""
    actors = ThreadPeers([RowActor(rank, 2, tensors) for rank in range(2)])
    weights = WeightSettings(verify="checksum", tries=1, bucket_bytes=2**20, **settings)
    made = partial(
        WeightSync, actors, EnginePeers([engine]), weights, ModelSettings(path=Path("m"), dtype="float32"), EngineSettings(tp=tp)
    )
    sync = await asyncio.to_thread(made, num_kv_heads=2, run_folder=Path())
    try:
        yield sync, actors.objects
    finally:
        sync.close()
        actors.close()


async def push(sync: WeightSync, version: int) -> dict[str, float]:
    return await asyncio.to_thread(sync.push, version, [])


async def generate(engine: Engine, **request) -> list[Completion]:
    fields = {"request_id": "r", "token_ids": PROMPT, "max_tokens": 30, "seed": 1, **request}
    return [completion async for completion in engine.generate(GenerateRequest(**fields))]


async def check_contract(engine: Engine, tensors: dict[str, torch.Tensor], stop: str, stop_prompt: tuple[int, ...] = PROMPT) -> None:
    (whole,) = await generate(engine)
    assert 0 < len(whole.token_ids) <= 30 and whole.finish_reason in ("stop", "length")
    assert all(logprob <= 0 for logprob in whole.logprobs)
    assert all(
        0 <= entropy <= math.log(engine.vocab_size) + error + 1e-6
        for entropy, error in zip(whole.entropies, whole.entropy_errors, strict=True)
    )
    assert whole.weight_versions == (VersionRun(engine.weight_version, len(whole.token_ids)),)

    probe, rest = await generate(engine, probe_tokens=20)
    assert probe.finish_reason == "probe" and len(probe.token_ids) == 20
    assert probe.token_ids + rest.token_ids == whole.token_ids, "the same seed draws the same tokens, probed or not"

    (short,) = await generate(engine, max_tokens=5, probe_tokens=20)
    assert short.finish_reason == "length" and len(short.token_ids) == 5

    (stopped,) = await generate(engine, token_ids=stop_prompt, stop=(stop,))
    assert stopped.finish_reason == "stop" and stopped.stop_text == stop and len(stopped.token_ids) < 30

    scores = await engine.score(PROMPT)
    assert len(scores) == len(PROMPT) - 1 and all(score <= 0 for score in scores)

    many = await asyncio.gather(*(generate(engine, seed=seed, probe_tokens=20) for seed in range(64)))
    assert all(sum(len(part.token_ids) for part in parts) <= 30 for parts in many)

    async with syncing(engine, tensors) as (sync, _):
        await push(sync, 6)
        await engine.sleep()
        held = asyncio.create_task(generate(engine))
        await asyncio.sleep(0.05)
        assert not held.done(), "asleep"
        await asyncio.to_thread(partial(sync.push, 7, [], asleep=True))
    (after,) = await held
    assert engine.weight_version == 7 and after.weight_versions == (VersionRun(7, len(after.token_ids)),)


def test_scripted(model: Path) -> None:
    def script(token_ids: tuple[int, ...], seed: int | None) -> ScriptedReply:
        if token_ids == STOPPING_PROMPT:
            return ScriptedReply(token_ids=(1, 2), logprobs=(-1.0,) * 2, entropies=(0.5,) * 2, stop_text="</python>")
        ids = tuple((seed or 0) * 7 + index for index in range(30))
        return ScriptedReply(token_ids=ids, logprobs=(-1.0,) * 30, entropies=(0.5,) * 30)

    engine = ScriptedEngine(script, vocab_size=400, scorer=lambda ids: [-1.0] * (len(ids) - 1))
    asyncio.run(check_contract(engine, weights_of(model, 1.0), "</python>", STOPPING_PROMPT))


@asynccontextmanager
async def vllm(model: Path, tp: int = 1) -> AsyncIterator[Engine]:
    from megatron_arpo.engine.vllm import VllmEngine

    engine = await VllmEngine.start(model, "float32", EngineSettings(max_model_len=512, kv_cache_gib=0.25, top_logprobs=20, tp=tp))
    try:
        yield engine
    finally:
        await engine.close()


def reference(model: Path, tensors: dict[str, torch.Tensor]) -> list[float]:
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made.load_state_dict(tensors, strict=False)
    made.tie_weights()
    with torch.no_grad():
        logprobs = made(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()


@pytest.mark.slow
def test_vllm(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "CRITICAL")
    old, new = weights_of(model, 1.0), weights_of(model, 1.3)

    async def check() -> None:
        async with vllm(model) as engine:
            (probe, rest) = await generate(engine, probe_tokens=20)
            drawn = [*PROMPT, *probe.token_ids, *rest.token_ids]
            scores = await engine.score(drawn)
            assert scores[-len(probe.token_ids + rest.token_ids) :] == pytest.approx([*probe.logprobs, *rest.logprobs], abs=1e-4)
            assert await engine.score(PROMPT) == pytest.approx(reference(model, old), abs=1e-4)

            from transformers import AutoTokenizer

            stop = AutoTokenizer.from_pretrained(model).decode([probe.token_ids[4]])
            await check_contract(engine, new, stop)
            assert await engine.score(PROMPT) == pytest.approx(reference(model, new), abs=1e-4), "tied output layer included"

            await check_failed_sync(engine, model)
            await check_torn_sync(engine, model)
            await check_memory_over_updates(engine, weights_of(model, 0.9))
            await check_update_in_flight(engine, weights_of(model, 1.3), keep_old=True, in_flight="keep")
            await check_update_in_flight(engine, weights_of(model, 0.7), keep_old=True, in_flight="recompute")
            await check_update_in_flight(engine, weights_of(model, 1.3), keep_old=False, in_flight="keep")

    asyncio.run(check())


async def check_failed_sync(engine: Engine, model: Path) -> None:
    """A fragment that is not as its actor wrote it: with `keep_old` the old version goes on serving, also while the sync fails."""
    serving = await engine.score(PROMPT)
    version = engine.weight_version
    async with syncing(engine, weights_of(model, 0.7)) as (sync, actors):
        send = actors[1].send_bucket
        actors[1].send_bucket = lambda *arguments: [value[::-1] for value in send(*arguments)]
        with pytest.raises(ValueError, match="has another checksum than its actor wrote"):
            await push(sync, version + 1)
        assert engine.weight_version == version
        assert await engine.score(PROMPT) == pytest.approx(serving, abs=1e-5)
        actors[1].send_bucket = send
        await push(sync, version + 1)
    assert await engine.score(PROMPT) == pytest.approx(reference(model, weights_of(model, 0.7)), abs=1e-4)


async def check_torn_sync(engine: Engine, model: Path) -> None:
    """Without `keep_old`, a sync that fails behind a loaded bucket holds generation until one succeeds."""
    version = engine.weight_version
    async with syncing(engine, weights_of(model, 1.1), keep_old=False) as (sync, actors):
        send, last = actors[1].send_bucket, len(sync.plan.buckets) - 1
        assert last > 0
        actors[1].send_bucket = lambda name, index, with_checksums: [
            value[::-1] if index == last else value for value in send(name, index, with_checksums)
        ]
        with pytest.raises(ValueError, match="has another checksum than its actor wrote"):
            await push(sync, version + 1)
        held = asyncio.create_task(generate(engine))
        await asyncio.sleep(0.3)
        assert not held.done() and engine.weight_version == version
        actors[1].send_bucket = send
        await push(sync, version + 1)
        await held
    assert await engine.score(PROMPT) == pytest.approx(reference(model, weights_of(model, 1.1)), abs=1e-4)


async def check_memory_over_updates(engine: Engine, weights: dict[str, torch.Tensor]) -> None:
    """50 times asleep, awake, updated and used: neither this process nor the engine's grow."""
    import psutil

    def resident() -> int:
        me = psutil.Process()
        return sum(one.memory_info().rss for one in [me, *me.children(recursive=True)])

    async with syncing(engine, weights) as (sync, _):
        for cycle in range(60):
            if cycle == 10:
                before = resident()
            await engine.sleep()
            await asyncio.to_thread(partial(sync.push, engine.weight_version + 1, [], asleep=True))
            await generate(engine, max_tokens=2)
    grown = resident() - before
    assert grown < 16 * 2**20, f"{grown / 2**20:.1f} MiB more after 50 updates"


async def check_update_in_flight(engine: Engine, weights: dict[str, torch.Tensor], keep_old: bool, in_flight: str) -> None:
    """A request lives through an update and goes on; a new one sees nothing of the old weights' keys and values."""
    version = engine.weight_version
    prompt = tuple(range(10, 10 + 2 * 128 + 5))  # two whole blocks of the prefix cache
    await generate(engine, token_ids=prompt, max_tokens=2)
    (cached,) = await generate(engine, token_ids=prompt, max_tokens=2)
    assert cached.cached_tokens >= 128
    async with syncing(engine, weights, keep_old=keep_old, in_flight=in_flight) as (sync, _):
        load, late = engine.load_buckets, []

        async def load_while_a_prompt_comes(*arguments: Any) -> None:
            late.append(asyncio.create_task(generate(engine, token_ids=prompt, max_tokens=2)))
            await load(*arguments)

        engine.load_buckets = load_while_a_prompt_comes
        request = GenerateRequest(request_id="r", token_ids=prompt, max_tokens=240, seed=1, probe_tokens=20)
        running = engine.generate(request)
        probe = await anext(running)
        seconds = await push(sync, version + 1)
        assert 0.0 < seconds["held_seconds"] <= seconds["seconds"]
        engine.load_buckets = load
        (came_late,) = await late[0]
        assert came_late.cached_tokens == 0 and came_late.weight_versions == (VersionRun(version + 1, 2),)
    (after,) = await generate(engine, token_ids=(*prompt[:-1], 9), max_tokens=2)
    assert after.weight_versions == (VersionRun(version + 1, 2),)
    rest = await anext(running)
    runs = join_runs([*probe.weight_versions, *rest.weight_versions])
    assert [run.version for run in runs] == [version, version + 1]
    drawn = rest.token_ids[-runs[-1].num_tokens :]
    assert len(drawn) > 20
    scores = (await engine.score([*prompt, *probe.token_ids, *rest.token_ids]))[-len(drawn) :]
    off = [abs(ours - theirs) for ours, theirs in zip(rest.logprobs[-len(drawn) :], scores, strict=True)]
    if in_flight == "recompute":
        assert max(off) < 1e-3, off
    else:
        assert max(off) > 1e-3, "kept keys and values are those of the old weights"


@pytest.mark.slow
def test_vllm_of_two_ranks_gets_its_slices_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over process groups, that bring each rank what the plan says it keeps, into memory that is zero elsewhere."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "CRITICAL")
    weights = weights_of(model, 1.3)

    async def check() -> None:
        async with vllm(model, tp=2) as engine, syncing(engine, weights, tp=2, transport="broadcast") as (sync, actors):
            values = await push(sync, 1)
            assert await engine.score(PROMPT) == pytest.approx(reference(model, weights), abs=1e-4)
            send = actors[1].send_bucket
            actors[1].send_bucket = lambda *arguments: [value[::-1] for value in send(*arguments)]
            with pytest.raises(ValueError, match="has another checksum than its actor wrote"):
                await push(sync, 2)
            assert engine.weight_version == 1
            assert await engine.score(PROMPT) == pytest.approx(reference(model, weights), abs=1e-4)
            actors[1].send_bucket = send
            started = time.monotonic()
            values = await push(sync, 2)
            assert engine.weight_version == 2 and time.monotonic() - started < 10
            assert await engine.score(PROMPT) == pytest.approx(reference(model, weights), abs=1e-4)
            whole = sum(tensor.nbytes for tensor in weights.values())
            assert whole < values["bytes"] < 1.02 * whole, "norms go to both ranks, all else to one"

    asyncio.run(check())


@pytest.mark.slow
def test_vllm_that_is_killed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "CRITICAL")

    async def check() -> None:
        async with vllm(model) as engine:
            import psutil

            alive = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
            (core,) = [one for one in alive if "EngineCor" in one.name() or "EngineCore" in " ".join(one.cmdline())]
            running = asyncio.create_task(generate(engine, max_tokens=400))
            await asyncio.sleep(0.3)
            async with syncing(engine, weights_of(model, 1.0)) as (sync, _):
                core.kill()
                with pytest.raises(EngineDied):
                    await running
                with pytest.raises(EngineDied):
                    await asyncio.wait_for(push(sync, 1), timeout=20)

    asyncio.run(check())
