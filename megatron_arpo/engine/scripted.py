"""An engine that reads its replies from a function: deterministic, no model, for tests and benches of what is above."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_arpo.engine.base import GenerateRequest
from megatron_arpo.types import Completion, WeightManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedReply:
    """What the scripted model would write if nothing cut it short. `entropy_errors` left out means exact entropies.

    Example: ScriptedReply(token_ids=(5, 9), logprobs=(-0.1, -2.3), entropies=(0.2, 1.1), stop_text="</python>")
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    entropies: tuple[float, ...]
    entropy_errors: tuple[float, ...] = ()
    stop_text: str | None = None
    finish: Literal["stop", "length", "abort"] = "stop"


Script = Callable[[tuple[int, ...], int | None], ScriptedReply]
"""(token ids of the request, its seed or None if it is greedy) -> reply."""


class ScriptedEngine:
    """Serves `script` as an Engine.

    A decoded token takes `token_latency_s` of `sleep`, which tests may replace by virtual time. `requests` lists every
    request in order of arrival. `load_weights` reads no file, only the manifest's version.
    """

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int,
        token_latency_s: float = 0.0,
        weight_version: int = 0,
        scorer: Callable[[Sequence[int]], list[float]] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._script = script
        self._vocab_size = vocab_size
        self._token_latency_s = token_latency_s
        self._scorer = scorer
        self._sleep = sleep
        self._num_running = 0
        self._loading = False
        self._changed = asyncio.Condition()
        self.weight_version = weight_version
        self.requests: list[GenerateRequest] = []

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        self.requests.append(request)
        async with self._changed:
            await self._changed.wait_for(lambda: not self._loading)
            self._num_running += 1
        try:
            reply = self._script(request.token_ids, None if request.temperature == 0.0 else request.seed)
            end = min(len(reply.token_ids), request.max_tokens)
            begin = 0
            if request.probe_tokens is not None and request.probe_tokens < end:
                begin = request.probe_tokens
                await self._sleep(begin * self._token_latency_s)
                yield self._slice(reply, 0, begin, "probe")
            await self._sleep((end - begin) * self._token_latency_s)
            cut_short = end < len(reply.token_ids)
            yield self._slice(reply, begin, end, "length" if cut_short else reply.finish)
        finally:
            self._num_running -= 1
            async with self._changed:
                self._changed.notify_all()

    def _slice(self, reply: ScriptedReply, begin: int, end: int, finish: Literal["stop", "length", "abort", "probe"]) -> Completion:
        errors = reply.entropy_errors or (0.0,) * len(reply.token_ids)
        return Completion(
            token_ids=reply.token_ids[begin:end],
            logprobs=reply.logprobs[begin:end],
            entropies=reply.entropies[begin:end],
            entropy_errors=errors[begin:end],
            finish_reason=finish,
            stop_text=reply.stop_text if finish == "stop" else None,
            min_weight_version=self.weight_version,
            max_weight_version=self.weight_version,
        )

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """What `scorer` says; without one, every token is equally likely."""
        if self._scorer is not None:
            return self._scorer(token_ids)
        return [-math.log(self._vocab_size)] * (len(token_ids) - 1)

    async def load_weights(self, path: str, manifest: WeightManifest) -> None:
        async with self._changed:
            self._loading = True
            try:
                await self._changed.wait_for(lambda: self._num_running == 0)
                self.weight_version = manifest.version
            finally:
                self._loading = False
                self._changed.notify_all()

    async def close(self) -> None:
        return None
