"""One inference engine with the growth of trees beside it, as a plain class; run/placement.py wraps it in a Ray actor.

Trees grow in the process that speaks to the engine: a branch's next request costs no hop over the network.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Literal

from megatron_arpo.agent_tools.build import build_tools
from megatron_arpo.agent_tools.parse import format_result, parse_tool_call
from megatron_arpo.algorithm.branching import ArpoBranching, NoBranching
from megatron_arpo.config.run import RunConfig
from megatron_arpo.data.chat import encode_prompt, encode_result
from megatron_arpo.engine.base import InFlight
from megatron_arpo.engine.transport.base import Connection
from megatron_arpo.engine.vllm import VllmEngine
from megatron_arpo.reward.base import get_reward
from megatron_arpo.rollout.base import RolloutLimits, SamplingSettings
from megatron_arpo.rollout.collect import collect
from megatron_arpo.types import Prompt, RolloutTree, ToolCall


class TokenizerCodec:
    """Turns in the published format: <name>arguments</name> in, " <result>text</result>" out."""

    def __init__(self, tokenizer: object, tool_names: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._tool_names = tuple(tool_names)

    @property
    def stop(self) -> tuple[str, ...]:
        return tuple(f"</{name}>" for name in self._tool_names)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def encode_result(self, text: str) -> tuple[int, ...]:
        return tuple(encode_result(self._tokenizer, format_result(text)))

    def parse(self, text: str) -> ToolCall | None:
        return parse_tool_call(text, self._tool_names)


class RolloutWorker:
    async def start(self, config: RunConfig) -> int:
        """Starts engine and tools; returns this process's pid."""
        from transformers import AutoTokenizer

        self._config = config
        self._reward = get_reward(config.reward)
        self._tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        self._tools = await build_tools(config.tools)
        self._engine = await VllmEngine.start(config.model.path, config.model.dtype, config.engine)
        return os.getpid()

    async def collect(
        self,
        prompts: Sequence[Prompt],
        branching: ArpoBranching | NoBranching,
        sampling: SamplingSettings,
        seed: int,
        with_tools: bool = True,
    ) -> tuple[list[RolloutTree], dict[str, float]]:
        """Scored trees in the order of `prompts`, and the tools' counts."""
        config = self._config
        trees = await collect(
            prompts,
            encode_prompt=lambda prompt: encode_prompt(self._tokenizer, prompt.messages),
            engine=self._engine,
            run_tool=self._tools.call,
            codec=TokenizerCodec(self._tokenizer, self._tools.names if with_tools else ()),
            branching=branching,
            limits=RolloutLimits(max_response_tokens=config.rollout.max_response_tokens, max_tool_calls=config.tools.max_calls),
            sampling=sampling,
            seed=seed,
            reward=self._reward,
            max_concurrent_trees=config.rollout.max_concurrent_trees,
        )
        return trees, self._tools.metrics()

    async def encode_prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return [list(encode_prompt(self._tokenizer, prompt.messages)) for prompt in prompts]

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return list(await asyncio.gather(*map(self._engine.score, sequences)))

    async def weight_version(self) -> int:
        return self._engine.weight_version

    async def connect_weights(self, connection: Connection) -> None:
        await self._engine.connect_weights(connection)

    async def receive_buckets(self, version: int, indices: Sequence[int]) -> None:
        await self._engine.receive_buckets(version, indices)

    async def check_buckets(self, version: int, checksums: Mapping[int, Sequence[str]]) -> None:
        await self._engine.check_buckets(version, checksums)

    async def begin_weights(self, in_flight: InFlight) -> None:
        await self._engine.begin_weights(in_flight)

    async def load_buckets(self, version: int, indices: Sequence[int]) -> None:
        await self._engine.load_buckets(version, indices)

    async def commit_weights(self, version: int) -> None:
        await self._engine.commit_weights(version)

    async def abandon_weights(self) -> None:
        await self._engine.abandon_weights()

    async def disconnect_weights(self) -> None:
        await self._engine.disconnect_weights()

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        await self._engine.wake(part)

    async def close(self) -> None:
        await asyncio.gather(self._engine.close(), self._tools.close(), return_exceptions=False)
