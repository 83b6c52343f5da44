"""An engine that reads its replies from a function: deterministic, no model, for tests and benches of what is above."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_arpo.engine.base import GenerateRequest, InFlight
from megatron_arpo.engine.transport.base import Connection
from megatron_arpo.types import Completion, VersionRun


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
    request in order of arrival. Weight updates move no bytes, only the version: requests in flight stop and go on.
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
        self._loading = self._is_asleep = False
        self._received: set[tuple[int, int]] = set()
        self._changed = asyncio.Condition()
        self.weight_version = weight_version
        self.requests: list[GenerateRequest] = []

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        self.requests.append(request)
        await self._while_loading()
        reply = self._script(request.token_ids, None if request.temperature == 0.0 else request.seed)
        end = min(len(reply.token_ids), request.max_tokens)
        begin = 0
        if request.probe_tokens is not None and request.probe_tokens < end:
            begin = request.probe_tokens
            await self._sleep(begin * self._token_latency_s)
            await self._while_loading()
            yield self._slice(reply, 0, begin, "probe")
        await self._sleep((end - begin) * self._token_latency_s)
        await self._while_loading()
        cut_short = end < len(reply.token_ids)
        yield self._slice(reply, begin, end, "length" if cut_short else reply.finish)

    async def _while_loading(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._loading)

    def _slice(self, reply: ScriptedReply, begin: int, end: int, finish: Literal["stop", "length", "abort", "probe"]) -> Completion:
        errors = reply.entropy_errors or (0.0,) * len(reply.token_ids)
        return Completion(
            token_ids=reply.token_ids[begin:end],
            logprobs=reply.logprobs[begin:end],
            entropies=reply.entropies[begin:end],
            entropy_errors=errors[begin:end],
            finish_reason=finish,
            stop_text=reply.stop_text if finish == "stop" else None,
            weight_versions=(VersionRun(self.weight_version, end - begin),) if end > begin else (),
        )

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """What `scorer` says; without one, every token is equally likely."""
        if self._scorer is not None:
            return self._scorer(token_ids)
        return [-math.log(self._vocab_size)] * (len(token_ids) - 1)

    async def connect_weights(self, connection: Connection) -> None:
        return None

    async def receive_buckets(self, version: int, indices: Sequence[int]) -> None:
        self._received.update((version, index) for index in indices)

    async def check_buckets(self, version: int, checksums: Mapping[int, Sequence[str]]) -> None:
        return None

    async def begin_weights(self, in_flight: InFlight) -> None:
        self._loading = True

    async def load_buckets(self, version: int, indices: Sequence[int]) -> None:
        if missing := [index for index in indices if (version, index) not in self._received]:
            raise ValueError(f"weights version {version}: buckets {missing} have not been received")

    async def commit_weights(self, version: int) -> None:
        self.weight_version = version
        self._received.clear()
        await self._go_on()

    async def abandon_weights(self) -> None:
        await self._go_on()

    async def disconnect_weights(self) -> None:
        return None

    async def sleep(self) -> None:
        self._loading = self._is_asleep = True

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        if part == "kv_cache":
            self._is_asleep = False
            await self._go_on()

    async def _go_on(self) -> None:
        async with self._changed:
            self._loading = self._is_asleep
            self._changed.notify_all()

    async def close(self) -> None:
        return None
