"""Grows one rollout tree: each branch is its own task that generates, calls its tool, is probed, forks and goes on.

No round, no barrier: a branch waits for its own tokens and its own tool only. What a turn looks like in tokens is the
codec's matter, whether to fork that of `algorithm/branching.py`, and scoring that of `rollout/collect.py`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from megatron_arpo.algorithm.branching import (
    ArpoBranching,
    BranchKey,
    ForkBudget,
    NoBranching,
    decide,
    keyed_seed,
    keyed_uniform,
)
from megatron_arpo.algorithm.entropy import PROBE_TOKENS, probe_entropy
from megatron_arpo.engine.base import Engine, GenerateRequest
from megatron_arpo.rollout.base import RolloutLimits, RunTool, SamplingSettings, TurnCodec
from megatron_arpo.types import (
    NO_PARENT,
    BranchDecision,
    Completion,
    FinishReason,
    Prompt,
    RolloutTree,
    Segment,
    SegmentKind,
    ToolCall,
    join_runs,
)


async def grow_tree(
    prompt: Prompt,
    prompt_token_ids: Sequence[int],
    *,
    engine: Engine,
    run_tool: RunTool,
    codec: TurnCodec,
    branching: ArpoBranching | NoBranching,
    limits: RolloutLimits,
    sampling: SamplingSettings,
    seed: int,
) -> RolloutTree:
    """Samples a tree with exactly `branching.num_rollouts` leaves for `prompt`; it carries no rewards yet.

    Segments are numbered depth first, a branch before its forks. With the `keyed` fork budget, the same seed, engine
    outputs and tool results give the same tree whatever the timing; pass another seed each step. A failing tool is a
    result; any exception cancels the whole tree and is raised as it is.
    """
    if sampling.temperature == 0.0 and branching.num_rollouts > 1:
        raise ValueError(
            f"sampling.temperature=0 with num_rollouts={branching.num_rollouts} would give copies of one trajectory; "
            "use num_rollouts=1 or a temperature above 0"
        )
    grower = _TreeGrower(prompt, tuple(prompt_token_ids), engine, run_tool, codec, branching, limits, sampling, seed)
    return await grower.grow()


@asynccontextmanager
async def cancelling_tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup that raises the first error itself instead of a group of it: callers can catch it by its type."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


@dataclass(slots=True)
class _Branch:
    """Where one trajectory stands. `turn` counts tool results on its path; `tip` is the segment its next tokens follow.

    `decided` says that no fork decision is due: at the prompt, and for a sibling at the result it was forked at.
    """

    key: BranchKey
    tip: int
    token_ids: tuple[int, ...]
    turn: int = 0
    initial_entropy: float | None = None
    decided: bool = True


class _TreeGrower:
    def __init__(
        self,
        prompt: Prompt,
        prompt_token_ids: tuple[int, ...],
        engine: Engine,
        run_tool: RunTool,
        codec: TurnCodec,
        branching: ArpoBranching | NoBranching,
        limits: RolloutLimits,
        sampling: SamplingSettings,
        seed: int,
    ) -> None:
        self._prompt = prompt
        self._engine = engine
        self._run_tool = run_tool
        self._codec = codec
        self._branching = branching
        self._max_tokens = len(prompt_token_ids) + limits.max_response_tokens
        self._max_tool_calls = limits.max_tool_calls
        self._sampling = sampling
        self._seed = seed
        self._probe_tokens = branching.probe_tokens if isinstance(branching, ArpoBranching) else PROBE_TOKENS
        self._budget = ForkBudget.of(branching)
        self._segments = [Segment(segment_id=0, parent_id=NO_PARENT, kind="prompt", token_ids=prompt_token_ids)]
        self._owners: list[BranchKey] = [()]

    async def grow(self) -> RolloutTree:
        async with cancelling_tasks() as self._tasks:
            initial = [self._start_from_prompt(key) for key in self._budget.branches()]
        segments = _depth_first(self._segments, self._owners)
        parents = {segment.parent_id for segment in segments}
        leaf_ids = tuple(segment.segment_id for segment in segments if segment.segment_id not in parents)
        assert len(leaf_ids) == self._branching.num_rollouts, "fork budget and leaves disagree"
        return RolloutTree(
            prompt=self._prompt,
            segments=segments,
            leaf_ids=leaf_ids,
            leaf_budget=self._branching.num_rollouts,
            root_entropy=math.fsum(branch.initial_entropy or 0.0 for branch in initial) / len(initial),
        )

    def _start_from_prompt(self, key: BranchKey) -> _Branch:
        branch = _Branch(key=key, tip=0, token_ids=self._segments[0].token_ids)
        self._start(branch)
        return branch

    def _start(self, branch: _Branch) -> None:
        self._tasks.create_task(self._run(branch), name=_key_text(branch.key))

    async def _run(self, branch: _Branch) -> None:
        while await self._take_turn(branch):
            pass
        for key in self._budget.end(branch.key):
            self._start_from_prompt(key)

    async def _take_turn(self, branch: _Branch) -> bool:
        """One generation and the tool call it ends in; False once the trajectory has ended."""
        completions, decision = await self._generate(branch)
        token_ids = tuple(token for part in completions for token in part.token_ids)
        context = branch.token_ids + token_ids
        finish, call = self._outcome(branch.turn, token_ids, completions[-1], room=self._max_tokens - len(context))
        result, result_ids, dropped = None, (), {}
        if call is not None:
            result = await self._run_tool(call)
            result_ids = self._codec.encode_result(result.text)
            if len(context) + len(result_ids) + 1 > self._max_tokens:
                finish, dropped = "length", {"tool_call": call, "tool_result": result}
        branch.tip = self._append(
            branch,
            "model",
            token_ids,
            logprobs=tuple(logprob for part in completions for logprob in part.logprobs),
            entropies=tuple(entropy for part in completions for entropy in part.entropies),
            max_entropy_error=max(error for part in completions for error in part.entropy_errors),
            weight_versions=join_runs(run for part in completions for run in part.weight_versions),
            finish_reason=finish,
            decision=decision,
            **dropped,
        )
        if finish != "tool_call":
            return False
        branch.tip = self._append(branch, "tool", result_ids, tool_call=call, tool_result=result)
        branch.token_ids = context + result_ids
        branch.turn += 1
        branch.decided = False
        return True

    async def _generate(self, branch: _Branch) -> tuple[list[Completion], BranchDecision | None]:
        """The next tokens of `branch`, forked on the way if a decision is due: the engine goes on meanwhile."""
        deciding = not branch.decided and self._budget.left(branch.key) > 0
        request = GenerateRequest(
            request_id=f"{self._prompt.prompt_id}/{self._seed}/{_key_text(branch.key)}/{branch.turn}",
            token_ids=branch.token_ids,
            max_tokens=self._max_tokens - len(branch.token_ids),
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            seed=keyed_seed(self._seed, self._prompt.prompt_id, branch.key, branch.turn),
            stop=self._codec.stop,
            probe_tokens=self._probe_tokens if deciding else None,
        )
        completions: list[Completion] = []
        decision = None
        async for completion in self._engine.generate(request):
            completions.append(completion)
            if deciding and decision is None:
                decision = self._decide(branch, completion)
        if not completions or completions[-1].finish_reason == "probe" or not completions[-1].token_ids:
            raise RuntimeError(f"the engine ended request {request.request_id} without tokens or without a reason")
        if branch.initial_entropy is None:
            branch.initial_entropy = self._probe(completions[0].entropies)
        return completions, decision

    def _decide(self, branch: _Branch, probe: Completion) -> BranchDecision:
        """Takes the fork decision due at the tool result `branch` stands behind, and starts the siblings there."""
        assert isinstance(self._branching, ArpoBranching) and branch.initial_entropy is not None
        entropy = self._probe(probe.entropies)
        drawn = keyed_uniform(self._seed, self._prompt.prompt_id, branch.key, branch.turn)
        probability, fork = decide(self._branching, branch.initial_entropy, entropy, drawn)
        num_wanted = self._branching.beam_size - 1 if fork else 0
        siblings = self._budget.fork(branch.key, branch.turn, num_wanted)
        for key in siblings:
            self._start(dataclasses.replace(branch, key=key, decided=True))
        return BranchDecision(
            initial_entropy=branch.initial_entropy,
            entropy=entropy,
            entropy_error=self._probe(probe.entropy_errors),
            probability=probability,
            drawn=drawn,
            num_forks=len(siblings),
        )

    def _probe(self, nats: Sequence[float]) -> float:
        return probe_entropy(nats, self._probe_tokens, self._engine.vocab_size)

    def _outcome(self, turn: int, token_ids: tuple[int, ...], last: Completion, room: int) -> tuple[FinishReason, ToolCall | None]:
        """Why the generation ended, and the call to make if the trajectory goes on. `room`: tokens left on its path."""
        if last.finish_reason == "length" or last.finish_reason == "abort":
            return last.finish_reason, None
        if last.stop_text not in self._codec.stop:
            return "stop", None
        call = self._codec.parse(self._codec.decode(token_ids))
        if call is None:
            return "stop", None
        if turn >= self._max_tool_calls:
            return "call_limit", None
        if room < 2:
            return "length", None
        return "tool_call", call

    def _append(self, branch: _Branch, kind: SegmentKind, token_ids: tuple[int, ...], **fields: Any) -> int:
        """Adds a segment behind `branch.tip`; its id is provisional until the tree is numbered depth first."""
        segment_id = len(self._segments)
        self._segments.append(Segment(segment_id=segment_id, parent_id=branch.tip, kind=kind, token_ids=token_ids, **fields))
        self._owners.append(branch.key)
        return segment_id


def _key_text(key: BranchKey) -> str:
    return ".".join(map(str, key))


def _depth_first(segments: Sequence[Segment], owners: Sequence[BranchKey]) -> tuple[Segment, ...]:
    """The segments renumbered depth first, children in the order of the keys of the branches they belong to."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for segment in segments[1:]:
        children[segment.parent_id].append(segment.segment_id)
    new_ids = {NO_PARENT: NO_PARENT}
    ordered: list[Segment] = []
    waiting = [0]
    while waiting:
        segment = segments[waiting.pop()]
        new_ids[segment.segment_id] = len(ordered)
        ordered.append(dataclasses.replace(segment, segment_id=len(ordered), parent_id=new_ids[segment.parent_id]))
        waiting.extend(sorted(children[segment.segment_id], key=lambda child: owners[child], reverse=True))
    return tuple(ordered)
