"""Rollout trees of the published shapes, with drawn lengths and forks and meaningless tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from megatron_arpo.types import LeafReward, Prompt, RolloutTree, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """`num_calls` tool calls a trajectory, of `max_result_tokens` each; a model turn before, between and behind them shares what is
    left of `max_response_tokens`. A branch forks after a result with `fork_probability` while the budget M - N lasts; the rest
    become fresh trajectories, as in ARPO."""

    num_leaves: int
    num_initial: int
    prompt_tokens: int
    max_response_tokens: int
    num_calls: int = 3
    max_result_tokens: int = 512
    fork_probability: float = 0.5
    least_length: float = 0.5
    """Turns and results are drawn between this share of their largest length and all of it."""

    def shrunk(self, scale: int) -> TreeShape:
        """The same tree with all lengths divided."""
        return TreeShape(
            num_leaves=self.num_leaves,
            num_initial=self.num_initial,
            prompt_tokens=self.prompt_tokens // scale,
            max_response_tokens=self.max_response_tokens // scale,
            num_calls=self.num_calls,
            max_result_tokens=self.max_result_tokens // scale,
            fork_probability=self.fork_probability,
            least_length=self.least_length,
        )

    @property
    def max_turn_tokens(self) -> int:
        return (self.max_response_tokens - self.num_calls * self.max_result_tokens) // (self.num_calls + 1)


REASONING = TreeShape(num_leaves=16, num_initial=8, prompt_tokens=1536, max_response_tokens=4096)
DEEP_SEARCH = TreeShape(num_leaves=12, num_initial=6, prompt_tokens=2000, max_response_tokens=6192)


def draw_tree(shape: TreeShape, seed: int, vocab_size: int) -> RolloutTree:
    """Branches advance in turns, so that early results are forked first, as they are when all run at the same time."""
    draw = random.Random(f"{seed}")

    def tokens(largest: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocab_size) for _ in range(draw.randint(max(1, int(largest * shape.least_length)), largest)))

    def add(parent_id: int, kind: str, largest: int) -> int:
        ids = tokens(largest)
        sampled = {"logprobs": (-1.0,) * len(ids), "entropies": (0.5,) * len(ids)} if kind == "model" else {}
        segments.append(Segment(segment_id=len(segments), parent_id=parent_id, kind=kind, token_ids=ids, **sampled))
        return segments[-1].segment_id

    segments: list[Segment] = []
    add(-1, "prompt", shape.prompt_tokens)
    budget = shape.num_leaves - shape.num_initial
    leaves: list[int] = []
    branches = [0] * shape.num_initial
    while branches:
        for _ in range(shape.num_calls):
            after_result = [add(add(branch, "model", shape.max_turn_tokens), "tool", shape.max_result_tokens) for branch in branches]
            branches = list(after_result)
            for branch in after_result:
                if budget and draw.random() < shape.fork_probability:
                    branches.append(branch)
                    budget -= 1
        leaves += [add(branch, "model", shape.max_turn_tokens) for branch in branches]
        branches, budget = [0] * budget, 0
    return RolloutTree(
        prompt=Prompt(prompt_id=str(seed), messages=({"role": "user", "content": "?"},), answer=("1",)),
        segments=tuple(segments),
        leaf_ids=tuple(leaves),
        leaf_budget=shape.num_leaves,
        rewards=tuple(LeafReward(score=draw.choice([-1.0, 0.0, 1.0])) for _ in leaves),
    )


def paths(tree: RolloutTree) -> list[RolloutTree]:
    """One tree for each trajectory, with its path alone: the flat batch."""
    found = []
    for leaf_id in tree.leaf_ids:
        path = tuple(replace(one, segment_id=index, parent_id=index - 1) for index, one in enumerate(tree.path(leaf_id)))
        found.append(RolloutTree(prompt=tree.prompt, segments=path, leaf_ids=(len(path) - 1,), leaf_budget=1))
    return found
