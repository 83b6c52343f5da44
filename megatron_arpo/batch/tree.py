"""Rollout trees -> packed rows: each token once, in depth-first order, with the summed advantages of the leaves it serves.

A position has one target, so where a segment has several children its last token moves into each of them: a token with c
successors is computed c times, every other token once. A tree that a row cannot hold is split by leaves; each part repeats
the prefix it needs and carries the sums of its own leaves, so that the sums over all rows stay exactly the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_arpo.algorithm.advantage import SharedAdvantage, attribute
from megatron_arpo.types import NO_TARGET, PackedRow, RolloutTree, Segment

_NOT_TRAINED = SharedAdvantage(positive=0.0, negative=0.0, weight=0.0, num_leaves=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedTree:
    """A tree with the advantage A_i and the weight w_i of each leaf, along `tree.leaf_ids`."""

    tree: RolloutTree
    advantages: tuple[float, ...]
    weights: tuple[float, ...]


@dataclass(slots=True)
class _RowBuilder:
    """PackedRow while it grows."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    subtree_end: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    advantage_pos: list[float] = field(default_factory=list)
    advantage_neg: list[float] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    multiplicity: list[int] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)

    def append(self, token_id: int, position: int, target: int, carried: SharedAdvantage, rollout_logprob: float) -> None:
        self.token_ids.append(token_id)
        self.positions.append(position)
        self.subtree_end.append(0)  # set once everything below stands
        self.targets.append(target)
        self.advantage_pos.append(carried.positive)
        self.advantage_neg.append(carried.negative)
        self.weight.append(carried.weight)
        self.multiplicity.append(carried.num_leaves)
        self.rollout_logprobs.append(rollout_logprob)

    def finish(self) -> PackedRow:
        return PackedRow(**{name: tuple(getattr(self, name)) for name in self.__slots__})


def pack_trees(trees: Sequence[WeightedTree], max_row_tokens: int, attribution: Literal["soft", "hard"] = "soft") -> list[PackedRow]:
    """Rows of at most `max_row_tokens`, trees in order. Raises ValueError where one trajectory alone is longer."""
    rows: list[_RowBuilder] = []
    for weighted in trees:
        for leaf_indices in _split_leaves(weighted.tree, max_row_tokens):
            layout = _Layout(weighted.tree, leaf_indices)
            if not rows or len(rows[-1].token_ids) + layout.num_tokens > max_row_tokens:
                rows.append(_RowBuilder())
            carried = attribute(weighted.tree, weighted.advantages, weighted.weights, attribution, leaf_indices)
            layout.write(rows[-1], carried)
    return [row.finish() for row in rows]


def _split_leaves(tree: RolloutTree, max_row_tokens: int) -> Iterator[list[int]]:
    """Leaf indices in depth-first order, cut into the fewest consecutive groups that a row can hold."""
    group: list[int] = []
    for index in _depth_first_leaves(tree):
        if _Layout(tree, [*group, index]).num_tokens <= max_row_tokens:
            group.append(index)
            continue
        if group:
            yield group
        group = [index]
        alone = _Layout(tree, group).num_tokens
        if alone > max_row_tokens:
            raise ValueError(
                f"prompt {tree.prompt.prompt_id}: a trajectory of {alone} tokens exceeds "
                f"actor.max_row_tokens={max_row_tokens}; raise it to {alone} or more"
            )
    yield group


def _depth_first_leaves(tree: RolloutTree) -> list[int]:
    leaf_index = {leaf_id: index for index, leaf_id in enumerate(tree.leaf_ids)}
    children, order, stack = tree.children(), [], [0]
    while stack:
        segment_id = stack.pop()
        if segment_id in leaf_index:
            order.append(leaf_index[segment_id])
        stack.extend(reversed(children[segment_id]))
    return order


class _Layout:
    """The part of one tree that leads to `leaf_indices`, as it will stand in a row."""

    def __init__(self, tree: RolloutTree, leaf_indices: Sequence[int]) -> None:
        self._segments = tree.segments
        self._children: dict[int, list[int]] = {}
        for index in leaf_indices:
            path = [segment.segment_id for segment in tree.path(tree.leaf_ids[index])]
            for segment_id, child in zip(path, [*path[1:], None], strict=True):
                known = self._children.setdefault(segment_id, [])
                if child is not None and child not in known:
                    known.append(child)

    @property
    def num_tokens(self) -> int:
        """Each token once, and at a fork one more for every child but the first."""
        unique = sum(len(self._segments[segment_id].token_ids) for segment_id in self._children)
        return unique + sum(max(0, len(children) - 1) for children in self._children.values())

    def write(self, row: _RowBuilder, carried: Mapping[int, SharedAdvantage]) -> None:
        """Depth first, without recursion: a tree may be deeper than Python's stack."""
        stack: list[tuple[int, int, int | None] | tuple[int, int]] = [(0, 0, None)]
        while stack:
            item = stack.pop()
            if len(item) == 2:  # everything below stands: close [start, end)
                start, end = item
                row.subtree_end[start:end] = [len(row.token_ids)] * (end - start)
                continue
            segment_id, depth, moved_token = item
            start = len(row.token_ids)
            moved_on = self._write_segment(row, carried, segment_id, depth, moved_token)
            end = len(row.token_ids)
            stack.append((start, end))
            for child in reversed(self._children[segment_id]):
                stack.append((child, depth + end - start, moved_on))

    def _write_segment(
        self, row: _RowBuilder, carried: Mapping[int, SharedAdvantage], segment_id: int, depth: int, moved_token: int | None
    ) -> int | None:
        """`moved_token` is the parent's last token where the parent forks; returns this segment's own where it forks."""
        segment, children = self._segments[segment_id], self._children[segment_id]

        def append(token_id: int, successor: tuple[Segment, int] | None) -> None:
            nonlocal depth
            if successor is None:
                row.append(token_id, depth, NO_TARGET, _NOT_TRAINED, 0.0)
            else:
                next_segment, offset = successor
                trained = next_segment.kind == "model"
                row.append(
                    token_id,
                    depth,
                    next_segment.token_ids[offset],
                    carried[next_segment.segment_id] if trained else _NOT_TRAINED,
                    next_segment.logprobs[offset] if trained else 0.0,
                )
            depth += 1

        if moved_token is not None:
            append(moved_token, (segment, 0))
        for offset in range(1, len(segment.token_ids)):
            append(segment.token_ids[offset - 1], (segment, offset))
        if len(children) > 1:
            return segment.token_ids[-1]
        append(segment.token_ids[-1], (self._segments[children[0]], 0) if children else None)
        return None
