"""The Engine role: token ids in, token ids with log-probs and entropies out. Adapters stand beside this file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_arpo.types import Completion, WeightManifest


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

    def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        """Yields one Completion, or two where `probe_tokens` is set and the completion is longer: first the probe
        (`finish_reason="probe"`), then the *remaining* tokens. Raises EngineDied when the engine is gone."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of token_ids[1:] at temperature 1 under the weights now served, length len(token_ids) - 1."""
        ...

    async def load_weights(self, path: str, manifest: WeightManifest) -> None:
        """Serves the weights of the flat buffer file `path` from now on. Requests in flight finish first; cached keys and
        values of older weights are dropped. Raises ValueError where file and manifest disagree; the old version then
        goes on serving."""
        ...

    async def close(self) -> None: ...
