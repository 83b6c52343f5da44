"""The Engine role: token ids in, token ids with log-probs and entropies out. Adapters stand beside this file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from megatron_arpo.types import Completion

if TYPE_CHECKING:
    from megatron_arpo.engine.transport.base import Connection

InFlight = Literal["keep", "recompute"]
"""What becomes of the keys and values of requests that live through an update: kept as the old weights made them, or made anew."""


class EngineDied(RuntimeError):
    """The engine's processes are gone; its requests must be sent again elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One generation. `temperature=0` is greedy. Generation ends at an end-of-text token, behind one of the `stop` strings
    (which stays in the output), or after `max_tokens`. With `probe_tokens=k` the first k tokens are handed out as soon as
    they exist, while the engine goes on without a pause."""

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    probe_tokens: int | None = None


class Engine(Protocol):
    """What rollout needs of an inference engine."""

    @property
    def vocab_size(self) -> int:
        """Size of the distribution that entropies are taken over."""
        ...

    @property
    def weight_version(self) -> int:
        """Of the weights that are served."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        """Yields one Completion, or two where `probe_tokens` is set and the completion is longer: first the probe
        (`finish_reason="probe"`), then the *remaining* tokens. Raises EngineDied when the engine is gone."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of token_ids[1:] at temperature 1 under the weights now served, length len(token_ids) - 1."""
        ...

    async def connect_weights(self, connection: Connection) -> None:
        """Once before the first update, and again after an engine was started anew. May wait for the actors."""
        ...

    async def receive_buckets(self, version: int, indices: Sequence[int]) -> None:
        """Takes buckets of `version` without touching what is served. Generation stops for the time that this takes, as for checks."""
        ...

    async def check_buckets(self, version: int, checksums: Mapping[int, Sequence[str]]) -> None:
        """Of received buckets, by index: raises ValueError where a fragment's checksum is not the given one."""
        ...

    async def begin_weights(self, in_flight: InFlight) -> None:
        """Holds generation, requests in flight included, until `commit_weights` or `abandon_weights`."""
        ...

    async def load_buckets(self, version: int, indices: Sequence[int]) -> None:
        """Puts received buckets into the model. From the first to the last bucket the model is of two versions."""
        ...

    async def commit_weights(self, version: int) -> None:
        """Serves `version` from now on: generation goes on, new requests see no keys and values of older weights. Raises ValueError
        where a worker lacks a bucket of it; generation is then held until an update succeeds."""
        ...

    async def abandon_weights(self) -> None:
        """Ends an update that failed. The old version goes on serving, unless a bucket was loaded already: generation is then held
        until an update succeeds."""
        ...

    async def disconnect_weights(self) -> None:
        """Closes this side of the connection, between updates."""
        ...

    async def sleep(self) -> None:
        """Gives up the memory of weights and KV cache, for actors on the same GPUs; requests in flight are ended. Generation is held
        until the engine has been woken and given weights."""
        ...

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Takes memory back: first the weights', to be filled by an update; behind that the KV cache's, and generation goes on."""
        ...

    async def close(self) -> None: ...
