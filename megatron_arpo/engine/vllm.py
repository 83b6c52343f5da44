"""The engine adapter for vLLM 0.32: the same code for `vllm` on GPU and for its CPU build."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from megatron_arpo.algorithm.entropy import entropy_from_logprobs
from megatron_arpo.config.rollout import EngineSettings
from megatron_arpo.engine.base import EngineDied, GenerateRequest
from megatron_arpo.engine.vllm_plugin import SHARE_CORES
from megatron_arpo.types import Completion, WeightManifest

_GIB = 2**30
_CPU_BATCHED_TOKENS = 8192
_WORKER_CLASS = "megatron_arpo.engine.vllm_worker.WeightLoader"


class VllmEngine:
    """One vLLM engine in processes of its own, spoken to from one event loop."""

    def __init__(self, llm: Any, vocab_size: int, top_logprobs: int) -> None:
        self._llm = llm
        self._vocab_size = vocab_size
        self._top_logprobs = min(top_logprobs, vocab_size)
        self._version = 0
        self._num_requests = 0

    @classmethod
    async def start(cls, model_path: Path, dtype: str, settings: EngineSettings) -> VllmEngine:
        """Starts the engine on the weights in `model_path`; takes some 20 s. The entry script needs a __main__ guard, since vLLM
        spawns its processes."""
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        for_platform: dict[str, Any] = {"gpu_memory_utilization": settings.gpu_memory_utilization}
        if current_platform.is_cpu():
            os.environ[SHARE_CORES] = "1"
            for_platform = {
                "kv_cache_memory_bytes": int(settings.kv_cache_gib * _GIB),
                "enforce_eager": True,
                # vLLM 0.32 rewinds a seeded request's generator after a partial prefill, which CPU generators can't do
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(settings.max_model_len, _CPU_BATCHED_TOKENS),
            }
        arguments = AsyncEngineArgs(
            model=str(model_path),
            dtype=dtype,
            seed=settings.seed,
            tensor_parallel_size=settings.tp,
            max_model_len=settings.max_model_len,
            max_logprobs=-1,
            logprobs_mode="processed_logprobs",  # those of the distribution that was sampled from
            enable_prefix_caching=True,
            worker_extension_cls=_WORKER_CLASS,
            generation_config="vllm",
            disable_log_stats=True,
            **for_platform,
        )
        llm = await asyncio.to_thread(AsyncLLM.from_engine_args, arguments)
        return cls(llm, llm.model_config.get_vocab_size(), settings.top_logprobs)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        streamed = request.probe_tokens is not None
        parameters = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            max_tokens=request.max_tokens,
            stop=list(request.stop) or None,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            logprobs=self._top_logprobs,
            flat_logprobs=True,
            stream_interval=request.probe_tokens,
            output_kind=RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY,
        )
        version = self._version
        tokens = _SampledTokens(self._vocab_size, self._top_logprobs)
        probed = 0
        async for output in self._outputs(list(request.token_ids), parameters):
            piece = output.outputs[0]
            tokens.extend(piece.token_ids, piece.logprobs)
            if streamed and not probed and len(tokens) > request.probe_tokens:
                probed = request.probe_tokens
                yield tokens.completion(0, probed, "probe", None, (version, self._version), output.num_cached_tokens)
            if output.finished:
                stop_text = piece.stop_reason if isinstance(piece.stop_reason, str) else None
                reason = piece.finish_reason if piece.finish_reason in ("stop", "length") else "abort"
                versions = (version, self._version)
                yield tokens.completion(probed, len(tokens), reason, stop_text, versions, output.num_cached_tokens)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        async for output in self._outputs(list(token_ids), parameters):
            if output.finished:
                found = output.prompt_logprobs
                return [found.logprobs[start] for start in found.start_indices[1:]]
        raise EngineDied("vLLM ended a scoring request without an output")

    async def load_weights(self, path: str, manifest: WeightManifest) -> None:
        values = dataclasses.asdict(manifest)
        problems = await self._call_workers("check_weights", path, values)
        if any(problems):
            raise ValueError(next(filter(None, problems)))
        await self._llm.pause_generation(mode="wait", clear_cache=True)
        try:
            await self._call_workers("load_weights_from_buffer", path, values)
            await self._llm.reset_prefix_cache()
            self._version = manifest.version
        finally:
            await self._llm.resume_generation()

    async def close(self) -> None:
        await asyncio.to_thread(self._llm.shutdown)

    async def _call_workers(self, method: str, *arguments: Any) -> list[Any]:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await self._llm.collective_rpc(method, args=arguments)
        except EngineDeadError as error:
            raise EngineDied(f"vLLM's engine process ended during {method}") from error

    async def _outputs(self, token_ids: list[int], parameters: Any) -> AsyncIterator[Any]:
        from vllm.v1.engine.exceptions import EngineDeadError

        self._num_requests += 1
        try:
            async for output in self._llm.generate({"prompt_token_ids": token_ids}, parameters, f"r{self._num_requests}"):
                yield output
        except EngineDeadError as error:
            raise EngineDied("vLLM's engine process ended while it generated") from error


class _SampledTokens:
    """Tokens as they come in, with log-prob and entropy of each."""

    def __init__(self, vocab_size: int, top_logprobs: int) -> None:
        self._vocab_size = vocab_size
        self._top_logprobs = top_logprobs
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._entropies: list[float] = []
        self._errors: list[float] = []

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, token_ids: Sequence[int], flat: Any) -> None:
        """`flat` is vLLM's FlatLogprobs: for each position the sampled token first, then the most likely ones. Where vLLM
        merged two streamed outputs, a sampled token that is among the most likely ones stands there only once."""
        self._ids.extend(token_ids)
        for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
            self._logprobs.append(flat.logprobs[start])
            first = start if end - start == self._top_logprobs else start + 1
            entropy, error = entropy_from_logprobs(flat.logprobs[first:end], self._vocab_size)
            self._entropies.append(entropy)
            self._errors.append(error)

    def completion(
        self, start: int, end: int, reason: Any, stop_text: str | None, versions: tuple[int, int], cached_tokens: int | None
    ) -> Completion:
        return Completion(
            token_ids=tuple(self._ids[start:end]),
            logprobs=tuple(self._logprobs[start:end]),
            entropies=tuple(self._entropies[start:end]),
            entropy_errors=tuple(self._errors[start:end]),
            finish_reason=reason,
            stop_text=stop_text,
            min_weight_version=versions[0],
            max_weight_version=versions[1],
            cached_tokens=cached_tokens or 0,
        )
