import asyncio
import dataclasses
import threading

import pytest

from megatron_arpo.algorithm.branching import ArpoBranching, NoBranching
from megatron_arpo.engine.scripted import ScriptedEngine, ScriptedReply
from megatron_arpo.rollout.base import RolloutLimits, SamplingSettings
from megatron_arpo.rollout.collect import collect
from megatron_arpo.rollout.metrics import rollout_metrics
from megatron_arpo.types import (
    BranchDecision,
    LeafReward,
    Prompt,
    RolloutTree,
    Segment,
    ToolCall,
    ToolResult,
)


class CharacterCodec:
    stop = ("</t>",)

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))

    def encode_result(self, text):
        return tuple(map(ord, f"<r>{text}</r>"))

    def parse(self, text):
        return ToolCall(name="t", arguments=text)


def calls_once(token_ids, seed):
    text = f"{seed} done" if ord("<") in token_ids else f"{seed}</t>"
    return ScriptedReply(
        token_ids=tuple(map(ord, text)),
        logprobs=(-1.0,) * len(text),
        entropies=(1.0,) * len(text),
        stop_text="</t>" if text.endswith("</t>") else None,
    )


def prompts(*prompt_ids):
    return [
        Prompt(prompt_id=prompt_id, messages=({"role": "user", "content": prompt_id},), answer=(prompt_id,)) for prompt_id in prompt_ids
    ]


async def answer(call):
    return ToolResult(text="5", status="ok")


def collected(asked, reward=lambda text, gold: LeafReward(score=float(len(gold[0]))), **changes):
    arguments = {
        "encode_prompt": lambda prompt: tuple(map(ord, prompt.prompt_id)),
        "engine": ScriptedEngine(calls_once, vocab_size=128),
        "run_tool": answer,
        "codec": CharacterCodec(),
        "branching": ArpoBranching(num_rollouts=4, num_initial=2, alpha=1.0, probe_tokens=2),
        "limits": RolloutLimits(max_response_tokens=1000, max_tool_calls=3),
        "sampling": SamplingSettings(),
        "seed": 3,
        "reward": reward,
        "max_concurrent_trees": 2,
    } | changes
    return asyncio.run(asyncio.wait_for(collect(asked, **arguments), timeout=4))


def test_trees_come_back_scored_and_in_the_order_of_the_prompts():
    """The first prompt's tools wait for the other trees; `on_tree` sees the trees in the order they are done."""
    done, released = [], asyncio.Event()

    def script(token_ids, seed):
        reply = calls_once(token_ids, seed)
        is_first = tuple(token_ids[:2]) == tuple(map(ord, "0a"))
        return dataclasses.replace(reply, token_ids=(ord("!"), *reply.token_ids[1:])) if is_first else reply

    async def run_tool(call):
        if call.arguments.startswith("!"):
            await released.wait()
        return await answer(call)

    def on_tree(tree):
        done.append(tree.prompt.prompt_id)
        if len(done) == 2:
            released.set()

    asked = prompts("0a", "b", "ccc")
    trees = collected(asked, engine=ScriptedEngine(script, vocab_size=128), run_tool=run_tool, on_tree=on_tree)
    assert [tree.prompt.prompt_id for tree in trees] == ["0a", "b", "ccc"]
    assert done[-1] == "0a"
    assert [[reward.score for reward in tree.rewards] for tree in trees] == [[2.0] * 4, [1.0] * 4, [3.0] * 4]


def test_the_reward_reads_the_response_text_in_a_thread():
    seen = []

    def reward(text, gold):
        seen.append((text, threading.current_thread() is threading.main_thread()))
        return LeafReward(score=float(text.count("<r>5</r>")))

    (tree,) = collected(prompts("p"), reward=reward)
    assert [reward.score for reward in tree.rewards] == [1.0] * 4
    expected = [CharacterCodec().decode(tree.response_token_ids(leaf_id)) for leaf_id in tree.leaf_ids]
    assert sorted(text for text, _ in seen) == sorted(expected)
    assert not any(in_main for _, in_main in seen)


@pytest.mark.parametrize("bound", [1, 3])
def test_no_more_trees_than_asked_for_grow_at_once(bound):
    growing, most = set(), []

    async def run_tool(call):
        growing.add(asyncio.current_task())
        most.append(len(growing))
        await asyncio.sleep(0.001)
        growing.discard(asyncio.current_task())
        return await answer(call)

    asked = prompts("a", "b", "c", "d", "e")
    collected(asked, run_tool=run_tool, max_concurrent_trees=bound, branching=NoBranching(num_rollouts=1))
    assert max(most) == bound


def test_a_prompt_that_comes_twice_gets_another_tree():
    first, second = collected(prompts("a", "a"))
    assert first.prompt == second.prompt and first.segments != second.segments
    (alone,) = collected(prompts("a"))
    assert alone == first


def test_a_broken_reward_is_raised_as_it_is():
    def reward(text, gold):
        raise ZeroDivisionError("judge")

    with pytest.raises(ZeroDivisionError, match="judge"):
        collected(prompts("a", "b"), reward=reward)
    with pytest.raises(ValueError, match="max_concurrent_trees=0"):
        collected(prompts("a"), max_concurrent_trees=0)


def a_tree(*scores):
    """prompt (2 tokens) -> model (3) -> tool (1) -> {model (2), model (4, cut by length)}"""
    decision = BranchDecision(initial_entropy=0.0, entropy=1.0, entropy_error=0.1, probability=0.7, drawn=0.1, num_forks=1)

    def model(segment_id, parent_id, num_tokens, entropy, **fields):
        tokens = {
            "token_ids": (1,) * num_tokens,
            "logprobs": (-1.0,) * num_tokens,
            "entropies": (entropy,) * num_tokens,
        }
        return Segment(segment_id=segment_id, parent_id=parent_id, kind="model", **tokens, **fields)

    return RolloutTree(
        prompt=prompts("p")[0],
        segments=(
            Segment(segment_id=0, parent_id=-1, kind="prompt", token_ids=(1, 2)),
            model(1, 0, 3, 1.0, finish_reason="tool_call", max_entropy_error=0.25),
            Segment(segment_id=2, parent_id=1, kind="tool", token_ids=(9,), tool_call=ToolCall(name="t", arguments="")),
            model(3, 2, 2, 0.5, finish_reason="stop", decision=decision),
            model(4, 2, 4, 0.0, finish_reason="length"),
        ),
        leaf_ids=(3, 4),
        leaf_budget=2,
        rewards=tuple(LeafReward(score=score) for score in scores),
    )


def test_metrics_by_hand():
    metrics = rollout_metrics([a_tree(1.0, 0.0), a_tree(1.0, 1.0)])
    assert metrics == {
        "num_trees": 2,
        "num_leaves": 4,
        "num_forks": 2,
        "num_fork_decisions": 2,
        "tool_calls_per_trajectory": 1.0,
        "response_tokens_mean": 7.0,
        "unique_tokens": 24,
        "flat_tokens": 36,
        "flat_over_unique_tokens": 1.5,
        "entropy_mean": pytest.approx(4.0 / 9.0),
        "entropy_error_max": 0.25,
        "finish_stop": 0.5,
        "finish_length": 0.5,
        "finish_call_limit": 0.0,
        "finish_abort": 0.0,
        "reward_mean": 0.75,
        "reward_std": pytest.approx((0.75 * 0.25) ** 0.5),
        "equal_reward_groups": 0.5,
    }


def test_metrics_without_rewards_and_without_trees():
    metrics = rollout_metrics([a_tree()])
    assert metrics["num_leaves"] == 2 and not any("reward" in name for name in metrics)
    with pytest.raises(ValueError, match="at least one tree"):
        rollout_metrics([])
