"""Rollout trees -> packed rows: each token once, in depth-first order, with the summed advantages of the leaves it serves.

A position has one target, so where a segment has several children its last token moves into each of them: a token with c
successors is computed c times, every other token once. A tree can be taken apart by leaves; each part repeats the prefix it needs
and carries the sums of its own leaves, so that the sums over all rows stay exactly the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatron_arpo.algorithm.advantage import SharedAdvantage, attribute
from megatron_arpo.types import NO_TARGET, PackedRow, RolloutTree, Segment

Attribution = Literal["soft", "hard"]
_NOT_TRAINED = SharedAdvantage(positive=0.0, negative=0.0, weight=0.0, num_leaves=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedTree:
    """A tree with the advantage A_i and the weight w_i of each leaf, along `tree.leaf_ids`."""

    tree: RolloutTree
    advantages: tuple[float, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class TreePart:
    """The part of a tree that leads to some of its leaves, given by their indices in depth-first order."""

    weighted: WeightedTree
    leaf_indices: tuple[int, ...]

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        """Segment id -> ids of its children within this part, for every segment in it."""
        found: dict[int, list[int]] = {}
        tree = self.weighted.tree
        for index in self.leaf_indices:
            path = [segment.segment_id for segment in tree.path(tree.leaf_ids[index])]
            for segment_id, child in zip(path, [*path[1:], None], strict=True):
                known = found.setdefault(segment_id, [])
                if child is not None and child not in known:
                    known.append(child)
        return found

    @cached_property
    def num_unique_tokens(self) -> int:
        return sum(len(self.weighted.tree.segments[segment_id].token_ids) for segment_id in self._children)

    @cached_property
    def num_tokens(self) -> int:
        """Each token once, and at a fork one more for every child but the first."""
        return self.num_unique_tokens + sum(max(0, len(children) - 1) for children in self._children.values())

    @cached_property
    def num_keys(self) -> int:
        """Keys seen, over all tokens: a token at depth d sees d + 1."""
        total, stack = 0, [(0, 0, False)]
        while stack:
            segment_id, depth, moved = stack.pop()
            children = self._children[segment_id]
            length = len(self.weighted.tree.segments[segment_id].token_ids) + moved - (len(children) > 1)
            total += length * depth + length * (length + 1) // 2
            stack.extend((child, depth + length, len(children) > 1) for child in children)
        return total

    def cuts(self) -> Iterator[tuple[TreePart, TreePart]]:
        """Every way of taking it apart in two, leaves in order."""
        for place in range(1, len(self.leaf_indices)):
            yield TreePart(self.weighted, self.leaf_indices[:place]), TreePart(self.weighted, self.leaf_indices[place:])


def tree_parts(weighted: WeightedTree, max_row_tokens: int) -> list[TreePart]:
    """The tree in the fewest parts of consecutive leaves that a row can hold, one where it can hold it whole. Raises ValueError
    where one trajectory alone is longer than a row."""
    parts: list[TreePart] = []
    group: tuple[int, ...] = ()
    for index in _depth_first_leaves(weighted.tree):
        if TreePart(weighted, (*group, index)).num_tokens <= max_row_tokens:
            group = (*group, index)
            continue
        alone = TreePart(weighted, (index,)).num_tokens
        if alone > max_row_tokens:
            raise ValueError(
                f"prompt {weighted.tree.prompt.prompt_id}: a trajectory of {alone} tokens exceeds "
                f"actor.max_row_tokens={max_row_tokens}; raise it to {alone} or more"
            )
        parts.append(TreePart(weighted, group))
        group = (index,)
    return [*parts, TreePart(weighted, group)]


def _depth_first_leaves(tree: RolloutTree) -> list[int]:
    leaf_index = {leaf_id: index for index, leaf_id in enumerate(tree.leaf_ids)}
    children, order, stack = tree.children(), [], [0]
    while stack:
        segment_id = stack.pop()
        if segment_id in leaf_index:
            order.append(leaf_index[segment_id])
        stack.extend(reversed(children[segment_id]))
    return order


def pack_row(parts: Sequence[TreePart], attribution: Attribution) -> PackedRow:
    """One row that holds `parts` one after the other."""
    row = PackedRow.empty()
    for part in parts:
        weighted = part.weighted
        carried = attribute(weighted.tree, weighted.advantages, weighted.weights, attribution, part.leaf_indices)
        _write_part(row, weighted.tree.segments, part._children, carried)
    return row


def _write_part(
    row: PackedRow, segments: Sequence[Segment], children: Mapping[int, list[int]], carried: Mapping[int, SharedAdvantage]
) -> None:
    """Depth first, without recursion: a tree may be deeper than Python's stack."""
    stack: list[tuple[int, int, tuple[int, ...]] | tuple[int, int]] = [(0, 0, ())]
    while stack:
        item = stack.pop()
        if len(item) == 2:  # everything below stands: close [start, end)
            start, end = item
            row.subtree_end[start:end] = array("i", [len(row)]) * (end - start)
            continue
        segment_id, depth, moved_token = item
        below = children[segment_id]
        start = len(row)
        kept = _write_segment(row, segments[segment_id], moved_token, [segments[child] for child in below], depth, carried)
        end = len(row)
        stack.append((start, end))
        moved_on = () if kept else segments[segment_id].token_ids[-1:]
        stack.extend((child, depth + end - start, moved_on) for child in reversed(below))


def _write_segment(
    row: PackedRow,
    segment: Segment,
    moved_token: tuple[int, ...],
    children: Sequence[Segment],
    depth: int,
    carried: Mapping[int, SharedAdvantage],
) -> bool:
    """`moved_token` is the parent's last token where the parent forks. Returns False where this segment's own last token moves on
    into its children."""
    keeps_last = len(children) <= 1
    tokens = moved_token + (segment.token_ids if keeps_last else segment.token_ids[:-1])
    row.token_ids.extend(tokens)
    row.positions.extend(range(depth, depth + len(tokens)))
    row.subtree_end.extend(array("i", [0]) * len(tokens))  # set once everything below stands
    # the successors of these tokens: this segment's own, from its first or second, and then the child's first
    first = 1 - len(moved_token)
    _write_targets(row, segment, first, len(segment.token_ids), carried)
    if keeps_last and children:
        _write_targets(row, children[0], 0, 1, carried)
    elif keeps_last:
        _extend_targets(row, (NO_TARGET,), _NOT_TRAINED, (0.0,))
    return keeps_last


def _write_targets(row: PackedRow, segment: Segment, start: int, end: int, carried: Mapping[int, SharedAdvantage]) -> None:
    trained = segment.kind == "model"
    logprobs = segment.logprobs[start:end] if trained else (0.0,) * (end - start)
    _extend_targets(row, segment.token_ids[start:end], carried[segment.segment_id] if trained else _NOT_TRAINED, logprobs)


def _extend_targets(row: PackedRow, targets: Sequence[int], carried: SharedAdvantage, logprobs: Sequence[float]) -> None:
    """Targets that all carry the same."""
    number = len(targets)
    row.targets.extend(targets)
    row.rollout_logprobs.extend(logprobs)
    row.advantage_pos.extend(array("d", [carried.positive]) * number)
    row.advantage_neg.extend(array("d", [carried.negative]) * number)
    row.weight.extend(array("d", [carried.weight]) * number)
    row.multiplicity.extend(array("i", [carried.num_leaves]) * number)
