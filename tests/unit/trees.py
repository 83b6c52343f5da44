"""Small rollout trees for tests: drawn at random, and each as its flat batch of one-path trees."""

from __future__ import annotations

import random

from megatron_arpo.types import LeafReward, Prompt, RolloutTree, Segment

VOCABULARY = 300


def segment(segment_id: int, parent_id: int, kind: str, token_ids: tuple[int, ...], logprobs: tuple[float, ...] | None = None) -> Segment:
    length = len(token_ids)
    if kind != "model":
        return Segment(segment_id=segment_id, parent_id=parent_id, kind=kind, token_ids=token_ids)
    return Segment(
        segment_id=segment_id,
        parent_id=parent_id,
        kind=kind,
        token_ids=token_ids,
        logprobs=logprobs or (-1.0,) * length,
        entropies=(0.5,) * length,
        min_weight_version=0,
        max_weight_version=0,
    )


def prompt(prompt_id: str = "p") -> Prompt:
    return Prompt(prompt_id=prompt_id, messages=({"role": "user", "content": "?"},), answer=("1",))


def tree_of(segments: list[Segment], rewards: list[float] | None = None, prompt_id: str = "p") -> RolloutTree:
    parents = {one.parent_id for one in segments}
    leaf_ids = tuple(one.segment_id for one in segments if one.segment_id not in parents)
    rewards = rewards if rewards is not None else [float(index % 2) for index in range(len(leaf_ids))]
    return RolloutTree(
        prompt=prompt(prompt_id),
        segments=tuple(segments),
        leaf_ids=leaf_ids,
        leaf_budget=len(leaf_ids),
        rewards=tuple(LeafReward(score=reward) for reward in rewards),
    )


def random_tree(seed: int, num_initial: int = 3, max_depth: int = 3, prompt_id: str = "p") -> RolloutTree:
    """Prompt -> `num_initial` model turns -> tool result -> one to three model turns -> ..., single-token segments included."""
    draw = random.Random(seed)

    def tokens(longest: int) -> tuple[int, ...]:
        return tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, longest)))

    def model(parent_id: int) -> Segment:
        ids = tokens(6)
        return segment(len(segments), parent_id, "model", ids, tuple(-draw.random() * 6 for _ in ids))

    segments = [segment(0, -1, "prompt", tokens(5))]
    frontier = []
    for _ in range(num_initial):
        segments.append(model(0))
        frontier.append((segments[-1].segment_id, 1))
    while frontier:
        parent_id, depth = frontier.pop()
        if depth == max_depth or draw.random() < 0.3:
            continue
        segments.append(segment(len(segments), parent_id, "tool", tokens(4)))
        tool_id = segments[-1].segment_id
        for _ in range(draw.randint(1, 3)):
            segments.append(model(tool_id))
            frontier.append((segments[-1].segment_id, depth + 1))
    num_leaves = len(segments) - len({one.parent_id for one in segments if one.parent_id >= 0})
    return tree_of(segments, [draw.choice([-1.0, 0.0, 0.5, 1.0, 1.1]) for _ in range(num_leaves)], prompt_id)


def flat_trees(tree: RolloutTree) -> list[RolloutTree]:
    """One tree a leaf, with that leaf's path alone: the flat batch."""
    flat = []
    for leaf_id in tree.leaf_ids:
        path = [segment(index, index - 1, one.kind, one.token_ids, one.logprobs or None) for index, one in enumerate(tree.path(leaf_id))]
        flat.append(tree_of(path, [0.0]))
    return flat
