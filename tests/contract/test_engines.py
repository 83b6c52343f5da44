"""What every engine must do, the scripted one and the real vLLM alike."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from megatron_arpo.config.rollout import EngineSettings
from megatron_arpo.engine.base import Engine, EngineDied, GenerateRequest
from megatron_arpo.engine.scripted import ScriptedEngine, ScriptedReply
from megatron_arpo.engine.weight_buffer import buffer_bytes, checksum, lay_out, manifest_of, mapped, tensor_at
from megatron_arpo.types import Completion, WeightManifest

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


def new_weights(model: Path, folder: Path, factor: float, version: int) -> tuple[Path, WeightManifest, dict[str, torch.Tensor]]:
    from safetensors.torch import load_file

    tensors = {name: tensor * factor for name, tensor in load_file(model / "model.safetensors").items()}
    places = lay_out([(name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items()])
    path = folder / f"weights-{version}"
    path.touch()
    with mapped(path, buffer_bytes(places)) as buffer:
        for place in places:
            tensor_at(buffer, place).copy_(tensors[place.name])
    return path, manifest_of(places, {name: checksum(tensor) for name, tensor in tensors.items()}, version), tensors


async def generate(engine: Engine, **request) -> list[Completion]:
    fields = {"request_id": "r", "token_ids": PROMPT, "max_tokens": 30, "seed": 1, **request}
    return [completion async for completion in engine.generate(GenerateRequest(**fields))]


async def check_contract(engine: Engine, path: Path, manifest: WeightManifest, stop: str, stop_prompt: tuple[int, ...] = PROMPT) -> None:
    (whole,) = await generate(engine)
    assert 0 < len(whole.token_ids) <= 30 and whole.finish_reason in ("stop", "length")
    assert all(logprob <= 0 for logprob in whole.logprobs)
    assert all(
        0 <= entropy <= math.log(engine.vocab_size) + error + 1e-6
        for entropy, error in zip(whole.entropies, whole.entropy_errors, strict=True)
    )
    assert (whole.min_weight_version, whole.max_weight_version) == (0, 0)

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

    await engine.load_weights(str(path), manifest)
    (after,) = await generate(engine)
    assert after.min_weight_version == after.max_weight_version == manifest.version


def test_scripted(tmp_path: Path, model: Path) -> None:
    def script(token_ids: tuple[int, ...], seed: int | None) -> ScriptedReply:
        if token_ids == STOPPING_PROMPT:
            return ScriptedReply(token_ids=(1, 2), logprobs=(-1.0,) * 2, entropies=(0.5,) * 2, stop_text="</python>")
        ids = tuple((seed or 0) * 7 + index for index in range(30))
        return ScriptedReply(token_ids=ids, logprobs=(-1.0,) * 30, entropies=(0.5,) * 30)

    path, manifest, _ = new_weights(model, tmp_path, 1.0, version=4)
    engine = ScriptedEngine(script, vocab_size=400, scorer=lambda ids: [-1.0] * (len(ids) - 1))
    asyncio.run(check_contract(engine, path, manifest, "</python>", STOPPING_PROMPT))


@asynccontextmanager
async def vllm(model: Path) -> AsyncIterator[Engine]:
    from megatron_arpo.engine.vllm import VllmEngine

    engine = await VllmEngine.start(model, "float32", EngineSettings(max_model_len=512, kv_cache_gib=0.25, top_logprobs=20))
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
def test_vllm(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "CRITICAL")
    path, manifest, tensors = new_weights(model, tmp_path, 1.3, version=4)
    _, _, old = new_weights(model, tmp_path, 1.0, version=0)

    async def check() -> None:
        async with vllm(model) as engine:
            (probe, rest) = await generate(engine, probe_tokens=20)
            drawn = [*PROMPT, *probe.token_ids, *rest.token_ids]
            scores = await engine.score(drawn)
            assert scores[-len(probe.token_ids + rest.token_ids) :] == pytest.approx([*probe.logprobs, *rest.logprobs], abs=1e-4)
            assert await engine.score(PROMPT) == pytest.approx(reference(model, old), abs=1e-4)

            wrong = dataclasses.replace(manifest, checksums=tuple(value ^ 1 for value in manifest.checksums))
            with pytest.raises(ValueError, match="another checksum"):
                await engine.load_weights(str(path), wrong)
            assert await engine.score(PROMPT) == pytest.approx(reference(model, old), abs=1e-4), "the old version goes on serving"

            from transformers import AutoTokenizer

            stop = AutoTokenizer.from_pretrained(model).decode([probe.token_ids[4]])
            await check_contract(engine, path, manifest, stop)
            assert await engine.score(PROMPT) == pytest.approx(reference(model, tensors), abs=1e-4), "tied output layer included"

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
            core.kill()
            with pytest.raises(EngineDied):
                await running

    asyncio.run(check())
