"""Many prompts to scored rollout trees: grows a bounded number of trees at once and scores every leaf."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

from megatron_arpo.algorithm.branching import ArpoBranching, NoBranching, keyed_seed
from megatron_arpo.engine.base import Engine
from megatron_arpo.reward.base import Reward
from megatron_arpo.rollout.base import RolloutLimits, RunTool, SamplingSettings, TurnCodec
from megatron_arpo.rollout.grow import cancelling_tasks, grow_tree
from megatron_arpo.types import Prompt, RolloutTree


async def collect(
    prompts: Sequence[Prompt],
    *,
    encode_prompt: Callable[[Prompt], Sequence[int]],
    engine: Engine,
    run_tool: RunTool,
    codec: TurnCodec,
    branching: ArpoBranching | NoBranching,
    limits: RolloutLimits,
    sampling: SamplingSettings,
    seed: int,
    reward: Reward,
    max_concurrent_trees: int,
    on_tree: Callable[[RolloutTree], None] | None = None,
) -> list[RolloutTree]:
    """Scored trees in the order of `prompts`; `on_tree` sees each as soon as it is scored.

    `reward` gets a leaf's decoded response (tool results included) and runs in a thread. Scoring does not hold up the
    next tree: the bound is on growing only. The first error cancels everything and is raised as it is.
    """
    if max_concurrent_trees < 1:
        raise ValueError(f"max_concurrent_trees={max_concurrent_trees} must be at least 1")
    slots = asyncio.Semaphore(max_concurrent_trees)

    async def one(prompt: Prompt, tree_seed: int) -> RolloutTree:
        async with slots:
            tree = await grow_tree(
                prompt,
                encode_prompt(prompt),
                engine=engine,
                run_tool=run_tool,
                codec=codec,
                branching=branching,
                limits=limits,
                sampling=sampling,
                seed=tree_seed,
            )
        tree = await _score(tree, codec, reward)
        if on_tree is not None:
            on_tree(tree)
        return tree

    async with cancelling_tasks() as tasks:
        growing = [tasks.create_task(one(prompt, tree_seed)) for prompt, tree_seed in zip(prompts, _tree_seeds(prompts, seed), strict=True)]
    return [task.result() for task in growing]


async def _score(tree: RolloutTree, codec: TurnCodec, reward: Reward) -> RolloutTree:
    texts = [codec.decode(tree.response_token_ids(leaf_id)) for leaf_id in tree.leaf_ids]
    async with cancelling_tasks() as tasks:
        scores = [tasks.create_task(asyncio.to_thread(reward, text, tree.prompt.answer)) for text in texts]
    return dataclasses.replace(tree, rewards=tuple(score.result() for score in scores))


def _tree_seeds(prompts: Sequence[Prompt], seed: int) -> list[int]:
    """`seed` for each prompt; a prompt that comes again gets another one each time, or its trees would be copies."""
    seen: Counter[str] = Counter()
    seeds: list[int] = []
    for prompt in prompts:
        times = seen[prompt.prompt_id]
        seeds.append(keyed_seed(seed, prompt.prompt_id, (), times) if times else seed)
        seen[prompt.prompt_id] += 1
    return seeds
