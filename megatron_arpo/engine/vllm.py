"""The engine adapter for vLLM 0.32: the same code for `vllm` on GPU and for its CPU build."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from megatron_arpo.algorithm.entropy import entropy_from_logprobs
from megatron_arpo.config.rollout import EngineSettings
from megatron_arpo.engine.base import EngineDied, GenerateRequest, InFlight
from megatron_arpo.engine.transport.base import Connection
from megatron_arpo.engine.vllm_plugin import SHARE_CORES, WEIGHT_TRANSFER
from megatron_arpo.types import Completion, VersionRun, join_runs

_GIB = 2**30
_CPU_BATCHED_TOKENS = 8192
_WORKER_EXTENSION = "megatron_arpo.engine.vllm_transfer.WeightErrors"
_Result = TypeVar("_Result")
_FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
"""Of weights/fp8.py, as published FP8 checkpoints describe themselves; output layer and routers are named as left alone."""


class VllmEngine:
    """One vLLM engine in processes of its own, spoken to from one event loop."""

    def __init__(self, llm: Any, vocab_size: int, top_logprobs: int) -> None:
        self._llm = llm
        self._vocab_size = vocab_size
        self._top_logprobs = min(top_logprobs, vocab_size)
        self._version = 0
        self._num_requests = 0
        self._is_updating = False
        self._is_torn = False
        self._is_asleep = False
        self._recompute = False
        self._serves = asyncio.Event()
        """Not set while generation is held: a request that comes then begins with the weights that come then."""
        self._serves.set()

    @classmethod
    async def start(cls, model_path: Path, dtype: str, settings: EngineSettings) -> VllmEngine:
        """Starts the engine on the weights in `model_path`; takes some 20 s. The entry script needs a __main__ guard, since vLLM
        spawns its processes."""
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        for_platform: dict[str, Any] = {"gpu_memory_utilization": settings.gpu_memory_utilization}
        if settings.fp8:
            num_layers = json.loads((model_path / "config.json").read_text())["num_hidden_layers"]
            left_alone = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(num_layers))]
            quantization = _FP8_BLOCKS | {"modules_to_not_convert": left_alone}
            for_platform |= {"hf_overrides": {"quantization_config": quantization}, "load_format": "dummy"}  # the first sync brings weights
        if current_platform.is_cpu():
            if settings.fp8:
                raise ValueError("engine.fp8=true needs CUDA; vLLM's CPU build has no FP8 layers")
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
            weight_transfer_config=WeightTransferConfig(backend=WEIGHT_TRANSFER),
            worker_extension_cls=_WORKER_EXTENSION,
            generation_config="vllm",
            enable_sleep_mode=settings.sleep,
            disable_log_stats=True,
            **for_platform,
        )
        llm = await asyncio.to_thread(AsyncLLM.from_engine_args, arguments)
        await llm.update_weight_version("0")
        return cls(llm, llm.model_config.get_vocab_size(), settings.top_logprobs)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def weight_version(self) -> int:
        return self._version

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
        tokens = _SampledTokens(self._vocab_size, self._top_logprobs)
        probed = 0
        async for output in self._outputs(list(request.token_ids), parameters):
            piece = output.outputs[0]
            tokens.extend(piece.token_ids, piece.logprobs, self._version)
            if streamed and not probed and len(tokens) > request.probe_tokens:
                probed = request.probe_tokens
                yield tokens.completion(0, probed, "probe", None, output.num_cached_tokens)
            if output.finished:
                if piece.weight_versions is not None:  # the engine's own account of which weights sampled which token
                    tokens.versions = [int(span.version) for span in piece.weight_versions for _ in range(span.start, span.end)]
                stop_text = piece.stop_reason if isinstance(piece.stop_reason, str) else None
                reason = piece.finish_reason if piece.finish_reason in ("stop", "length") else "abort"
                yield tokens.completion(probed, len(tokens), reason, stop_text, output.num_cached_tokens)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        async for output in self._outputs(list(token_ids), parameters):
            if output.finished:
                found = output.prompt_logprobs
                return [found.logprobs[start] for start in found.start_indices[1:]]
        raise EngineDied("vLLM ended a scoring request without an output")

    async def connect_weights(self, connection: Connection) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        values = {"connection": connection.model_dump(mode="json")}
        await self._weights("connect", self._llm.init_weight_transfer_engine(WeightTransferInitRequest(values)))

    async def receive_buckets(self, version: int, indices: Sequence[int]) -> None:
        await self._update(version, "receive", indices)

    async def check_buckets(self, version: int, checksums: Mapping[int, Sequence[str]]) -> None:
        await self._update(version, "check", list(checksums), [list(one) for one in checksums.values()])

    async def begin_weights(self, in_flight: InFlight) -> None:
        self._serves.clear()
        await self._weights("pause", self._llm.pause_generation(mode="keep", clear_cache=False))
        self._recompute = in_flight == "recompute"

    async def load_buckets(self, version: int, indices: Sequence[int]) -> None:
        self._is_torn = True
        await self._update(version, "load", indices)

    async def commit_weights(self, version: int) -> None:
        await self._update(version, "complete", [])
        await self._finish(str(version))
        # new requests carry another salt; what old weights left in the cache would only take room
        await self._weights("cache", self._llm.reset_prefix_cache(reset_running_requests=self._recompute))
        self._version = version
        self._is_torn = False
        if not self._is_asleep:
            await self._weights("resume", self._llm.resume_generation())
            self._serves.set()

    async def abandon_weights(self) -> None:
        if self._is_updating:
            await self._finish(None)
        if not self._is_torn:
            await self._weights("resume", self._llm.resume_generation())
            self._serves.set()

    async def disconnect_weights(self) -> None:
        await self._weights("disconnect", self._llm.shutdown_weight_transfer_engine())

    async def sleep(self) -> None:
        self._serves.clear()
        self._is_torn = self._is_asleep = True  # its weights are gone until an update brings new ones
        await self._llm.sleep(level=2, mode="abort")

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        await self._llm.wake_up(tags=[part])
        if part == "kv_cache":
            self._is_asleep = False
            if not self._is_torn:
                self._serves.set()

    async def close(self) -> None:
        await asyncio.to_thread(self._llm.shutdown)

    async def _update(self, version: int, action: str, indices: Sequence[int], checksums: list[list[str]] | None = None) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if not self._is_updating:
            await self._weights("start", self._llm.start_weight_update())
            self._is_updating = True
        values = {"version": version, "action": action, "buckets": list(indices), "checksums": checksums}
        await self._weights("update", self._llm.update_weights(WeightTransferUpdateRequest(values)))
        if problem := next(filter(None, await self._weights("update", self._llm.collective_rpc("take_weight_error"))), ""):
            raise ValueError(problem)

    async def _finish(self, version: str | None) -> None:
        self._is_updating = False
        await self._weights("finish", self._llm.finish_weight_update(version))

    async def _weights(self, what: str, call: Awaitable[_Result]) -> _Result:
        """A call to the workers; what they raise comes as ValueError with its text, since vLLM brings no more."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await call
        except EngineDeadError as error:
            self._serves.set()  # for requests to find out
            raise EngineDied(f"vLLM's engine process ended during a weight update ({what})") from error
        except Exception as error:
            raise ValueError(f"weight update ({what}): {error}") from error

    async def _outputs(self, token_ids: list[int], parameters: Any) -> AsyncIterator[Any]:
        from vllm.v1.engine.exceptions import EngineDeadError

        await self._serves.wait()
        self._num_requests += 1
        try:
            # the salt keeps a request from keys and values that other weights left in the prefix cache
            prompt = {"prompt_token_ids": token_ids, "cache_salt": f"v{self._version}"}
            async for output in self._llm.generate(prompt, parameters, f"r{self._num_requests}"):
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
        self.versions: list[int] = []
        """Of the weights that sampled each token."""

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, token_ids: Sequence[int], flat: Any, version: int) -> None:
        """`flat` is vLLM's FlatLogprobs: for each position the sampled token first, then the most likely ones. Where vLLM
        merged two streamed outputs, a sampled token that is among the most likely ones stands there only once."""
        self._ids.extend(token_ids)
        self.versions.extend([version] * len(token_ids))
        for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
            self._logprobs.append(flat.logprobs[start])
            first = start if end - start == self._top_logprobs else start + 1
            entropy, error = entropy_from_logprobs(flat.logprobs[first:end], self._vocab_size)
            self._entropies.append(entropy)
            self._errors.append(error)

    def completion(self, start: int, end: int, reason: Any, stop_text: str | None, cached_tokens: int | None) -> Completion:
        return Completion(
            token_ids=tuple(self._ids[start:end]),
            logprobs=tuple(self._logprobs[start:end]),
            entropies=tuple(self._entropies[start:end]),
            entropy_errors=tuple(self._errors[start:end]),
            finish_reason=reason,
            stop_text=stop_text,
            weight_versions=join_runs(VersionRun(version, 1) for version in self.versions[start:end]),
            cached_tokens=cached_tokens or 0,
        )
