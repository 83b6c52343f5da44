"""Small rollout trees for tests: drawn at random, and each as its flat batch of one-path trees."""

from __future__ import annotations

import random

from megatron_arpo.algorithm.advantage import group_advantages, leaf_weights
from megatron_arpo.batch.schedule import Placement, RowCost, schedule_trees
from megatron_arpo.batch.tree import WeightedTree
from megatron_arpo.types import NO_TARGET, LeafReward, PackedRow, Prompt, RolloutTree, Segment, VersionRun

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
        weight_versions=(VersionRun(0, length),),
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


def tree_rows(trees: list[RolloutTree], aggregation: str, attribution: str, max_row_tokens: int) -> list[PackedRow]:
    """The rows of a mini-batch as a step makes them."""
    weights = leaf_weights(trees, aggregation)
    weighted = [
        WeightedTree(tree=tree, advantages=group_advantages([reward.score for reward in tree.rewards]), weights=tree_weights)
        for tree, tree_weights in zip(trees, weights, strict=True)
    ]
    placement = Placement(num_ranks=1, max_row_tokens=max_row_tokens, cost=RowCost(per_token=1.0, per_key=0.01))
    return list(schedule_trees(weighted, placement, attribution).rows[0])


def flat_rows(trees: list[RolloutTree], aggregation: str, attribution: str) -> list[PackedRow]:
    """The same mini-batch with one row a trajectory, written down from the definitions and from no code of batch/ or algorithm/."""
    lengths = [[sum(len(one.token_ids) for one in tree.path(leaf) if one.kind == "model") for leaf in tree.leaf_ids] for tree in trees]
    num_leaves, num_tokens = sum(map(len, lengths)), sum(map(sum, lengths))
    rows = []
    for tree, tree_lengths in zip(trees, lengths, strict=True):
        scores = [reward.score for reward in tree.rewards]
        mean = sum(scores) / len(scores)
        std = (sum((score - mean) ** 2 for score in scores) / (len(scores) - 1)) ** 0.5
        advantages = [(score - mean) / (std + 1e-6) for score in scores]
        for index, (leaf_id, length) in enumerate(zip(tree.leaf_ids, tree_lengths, strict=True)):
            weight = {"token-mean": 1 / num_tokens, "seq-mean-token-mean": 1 / (num_leaves * length), "seq-mean-token-sum": 1 / num_leaves}
            tokens: list[int] = []
            about: list[tuple[float, float, int, float]] = []  # advantage, weight, trained, log-prob of each token
            for one in tree.path(leaf_id):
                below = [other for other, leaf in enumerate(tree.leaf_ids) if one in tree.path(leaf)]
                hard = sum(advantages[other] for other in below) / len(below)
                trained = one.kind == "model"
                for place, token in enumerate(one.token_ids):
                    tokens.append(token)
                    advantage = hard if attribution == "hard" else advantages[index]
                    about.append((advantage, weight[aggregation], 1, one.logprobs[place]) if trained else (0.0, 0.0, 0, 0.0))
            about = [*about[1:], (0.0, 0.0, 0, 0.0)]  # a position predicts the next token
            rows.append(
                PackedRow.of(
                    token_ids=tuple(tokens),
                    positions=tuple(range(len(tokens))),
                    subtree_end=(len(tokens),) * len(tokens),
                    targets=(*tokens[1:], NO_TARGET),
                    advantage_pos=tuple(max(advantage, 0.0) * w for advantage, w, _, _ in about),
                    advantage_neg=tuple(min(advantage, 0.0) * w for advantage, w, _, _ in about),
                    weight=tuple(w for _, w, _, _ in about),
                    multiplicity=tuple(trained for _, _, trained, _ in about),
                    rollout_logprobs=tuple(logprob for _, _, _, logprob in about),
                )
            )
    return rows


def joined(rows: list[PackedRow]) -> PackedRow:
    """One row with all of them behind each other."""
    found = PackedRow.empty()
    for row in rows:
        start = len(found)
        for name in PackedRow.__slots__:
            values = getattr(row, name)
            getattr(found, name).extend([end + start for end in values] if name == "subtree_end" else values)
    return found
