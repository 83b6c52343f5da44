"""The records that every stage of a step hands to the next: prompts, completions, tool results, rollout trees, packed rows.

Plain frozen dataclasses on the standard library alone, so that reading a run needs neither torch nor Ray.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SegmentKind = Literal["prompt", "model", "tool"]
FinishReason = Literal["stop", "tool_call", "length", "call_limit", "abort"]
ToolStatus = Literal["ok", "error", "timeout", "unavailable"]

NO_PARENT = -1
NO_TARGET = -1
"""Target of a position that predicts nothing: the end of a trajectory, or a token inside the prompt before a fork."""


def _require_equal_lengths(record: str, **lengths: int) -> None:
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name}={length}" for name, length in lengths.items())
        raise ValueError(f"{record}: fields that run along the tokens must have equal lengths, got {shown}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question of a dataset.

    Example: Prompt(prompt_id="train-7", messages=({"role": "user", "content": "What is 2 + 3?"},), answer=("5",),
    source="gsm8k", metadata={"ability": "math"})
    """

    prompt_id: str
    messages: tuple[Mapping[str, str], ...]
    answer: tuple[str, ...]
    source: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError(f"prompt {self.prompt_id}: messages must not be empty")
        if not self.answer:
            raise ValueError(f"prompt {self.prompt_id}: answer must hold at least one gold answer")


@dataclass(frozen=True, slots=True)
class VersionRun:
    """Tokens in a row that one version of the weights sampled. A request that lives through a weight update has several runs.

    Example: (VersionRun(3, 20), VersionRun(4, 5)) are 20 tokens of version 3 and then 5 of version 4.
    """

    version: int
    num_tokens: int


def join_runs(runs: Iterable[VersionRun]) -> tuple[VersionRun, ...]:
    """The same tokens with neighbours of one version in one run, and no empty runs."""
    joined: list[VersionRun] = []
    for run in runs:
        if joined and joined[-1].version == run.version:
            joined[-1] = VersionRun(run.version, joined[-1].num_tokens + run.num_tokens)
        elif run.num_tokens:
            joined.append(run)
    return tuple(joined)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Tokens that an engine sampled for one request, with what it knew about each of them.

    `logprobs` are natural logs at the sampling temperature. `entropies` are nats over the vocabulary; `entropy_errors` bounds
    how far each may be off (0 where the engine saw the full distribution). `stop_text` is the stop string that ended the
    completion, if one did. `cached_tokens` counts prompt tokens that were served from the KV cache.

    Example: Completion(token_ids=(5, 9), logprobs=(-0.1, -2.3), entropies=(0.2, 1.1), entropy_errors=(0.0, 0.0),
    finish_reason="stop", stop_text="</python>", weight_versions=(VersionRun(3, 2),))
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    entropies: tuple[float, ...]
    entropy_errors: tuple[float, ...]
    finish_reason: Literal["stop", "length", "abort", "probe"]
    stop_text: str | None = None
    weight_versions: tuple[VersionRun, ...]
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        _require_equal_lengths(
            "Completion",
            token_ids=len(self.token_ids),
            logprobs=len(self.logprobs),
            entropies=len(self.entropies),
            entropy_errors=len(self.entropy_errors),
            weight_versions=sum(run.num_tokens for run in self.weight_versions),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool the model asked for. Example: ToolCall(name="python", arguments="print(2 + 3)")."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a tool answered; a failing tool is a result with a status, never an exception.

    Example: ToolResult(text="5", status="ok", latency_s=0.02)
    """

    text: str
    status: ToolStatus
    latency_s: float = 0.0
    cached: bool = False
    num_tries: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchDecision:
    """One fork decision, taken once the probe tokens after a tool result are out (arXiv 2507.19849, sec. 3.1).

    Entropies are sums over the first k tokens divided by log V. `drawn` is the uniform number compared with `probability`.
    `num_forks` siblings were started.
    """

    initial_entropy: float
    entropy: float
    entropy_error: float
    probability: float
    drawn: float
    num_forks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of tokens with one author. Model segments carry a log-prob and an entropy for each token, the others none;
    `weight_versions` says which weights sampled them, where that is known.

    `max_entropy_error` bounds how far each of the entropies may be off. A tool segment names its call and result; a model
    segment does only where the call was made and its result did not fit (`finish_reason="length"`).

    Example: a tool segment after model segment 1:
    Segment(segment_id=2, parent_id=1, kind="tool", token_ids=(7, 8), tool_call=ToolCall(name="python", arguments="1+1"), ...)
    """

    segment_id: int
    parent_id: int
    kind: SegmentKind
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    max_entropy_error: float = 0.0
    weight_versions: tuple[VersionRun, ...] = ()
    finish_reason: FinishReason | None = None
    tool_call: ToolCall | None = None
    tool_result: ToolResult | None = None
    decision: BranchDecision | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"segment {self.segment_id}: a segment holds at least one token")
        if self.kind == "model":
            _require_equal_lengths(
                f"model segment {self.segment_id}",
                token_ids=len(self.token_ids),
                logprobs=len(self.logprobs),
                entropies=len(self.entropies),
                weight_versions=sum(run.num_tokens for run in self.weight_versions) if self.weight_versions else len(self.token_ids),
            )
        elif self.logprobs or self.entropies or self.weight_versions:
            raise ValueError(f"segment {self.segment_id}: a {self.kind} segment carries no log-probs, entropies and weight versions")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafReward:
    """The score of one trajectory. `parts` names what it was made of. Example: LeafReward(score=1.1, reason="...", parts={"f1": 1.0})."""

    score: float
    reason: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTree:
    """All trajectories sampled for one prompt, shared parts stored once.

    Segment 0 is the prompt; segment ids are indices into `segments` and a parent always stands before its children.
    `leaf_ids` are the segments where trajectories end, depth first; `rewards`, once scored, runs along them. `root_entropy` is
    the mean probe entropy of the initial trajectories' first tokens.

    Example: prompt 0 -> model 1 -> tool 2 -> {model 3, model 4}: leaf_ids=(3, 4), path(4) = segments 0, 1, 2, 4.
    """

    prompt: Prompt
    segments: tuple[Segment, ...]
    leaf_ids: tuple[int, ...]
    leaf_budget: int
    root_entropy: float = 0.0
    rewards: tuple[LeafReward, ...] = ()

    def __post_init__(self) -> None:
        for index, segment in enumerate(self.segments):
            if segment.segment_id != index:
                raise ValueError(f"tree {self.prompt.prompt_id}: segment {segment.segment_id} stands at index {index}")
            if (index == 0) != (segment.parent_id == NO_PARENT) or segment.parent_id >= index:
                raise ValueError(f"tree {self.prompt.prompt_id}: segment {index} has parent {segment.parent_id}")
        if self.rewards and len(self.rewards) != len(self.leaf_ids):
            raise ValueError(f"tree {self.prompt.prompt_id}: {len(self.rewards)} rewards for {len(self.leaf_ids)} leaves")

    def path(self, leaf_id: int) -> tuple[Segment, ...]:
        """Segments from the prompt down to `leaf_id`."""
        found: list[Segment] = []
        segment_id = leaf_id
        while segment_id != NO_PARENT:
            found.append(self.segments[segment_id])
            segment_id = self.segments[segment_id].parent_id
        return tuple(reversed(found))

    def children(self) -> dict[int, list[int]]:
        """Segment id -> ids of its children, in order of creation."""
        found: dict[int, list[int]] = {segment.segment_id: [] for segment in self.segments}
        for segment in self.segments[1:]:
            found[segment.parent_id].append(segment.segment_id)
        return found

    def leaves_under(self, segment_id: int) -> tuple[int, ...]:
        """Indices into `leaf_ids` of the trajectories that pass through `segment_id`."""
        return tuple(
            index for index, leaf_id in enumerate(self.leaf_ids) if any(segment.segment_id == segment_id for segment in self.path(leaf_id))
        )

    def response_token_ids(self, leaf_id: int) -> list[int]:
        """Token ids of one trajectory after the prompt, tool results included."""
        return [token for segment in self.path(leaf_id)[1:] for token in segment.token_ids]

    def model_segments(self) -> Iterator[Segment]:
        return (segment for segment in self.segments if segment.kind == "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """One micro-batch of T tokens; several trees stand one after the other, each in depth-first order.

    subtree_end[k] is one past the last token below k: query q sees key k iff k <= q < subtree_end[k]. `positions` are depths.
    `targets` holds the next token of the path, or NO_TARGET. The rest describes the target and is 0 where it is not trained:
    `advantage_pos` and `advantage_neg` are sum w_i max(A_i, 0) and sum w_i min(A_i, 0) over the leaves i through it, `weight` is
    sum w_i, `multiplicity` counts those leaves, `rollout_logprobs` is the engine's log-prob. Arrays of "i" and "d", since a step
    has millions of tokens.

    Example: prompt (1, 2) with leaves (3,) and (4,) has token_ids (1, 2, 3, 2, 4), positions (0, 1, 2, 1, 2), subtree_end
    (5, 3, 3, 5, 5) and targets (NO_TARGET, 3, NO_TARGET, 4, NO_TARGET): the token before a fork is copied into each child.
    """

    token_ids: array[int]
    positions: array[int]
    subtree_end: array[int]
    targets: array[int]
    advantage_pos: array[float]
    advantage_neg: array[float]
    weight: array[float]
    multiplicity: array[int]
    rollout_logprobs: array[float]

    def __post_init__(self) -> None:
        _require_equal_lengths("PackedRow", **{name: len(getattr(self, name)) for name in self.__slots__})

    @classmethod
    def of(cls, **values: Iterable[float]) -> PackedRow:
        """From any sequences, by field."""
        return cls(**{name: array(_ROW_TYPES[name], values[name]) for name in cls.__slots__})

    @classmethod
    def empty(cls) -> PackedRow:
        """A row to be filled by its writer."""
        return cls.of(**dict.fromkeys(cls.__slots__, ()))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_keys(self) -> int:
        """Keys seen, over all tokens: what attention costs."""
        return sum(self.positions) + len(self)


_FLOATS = ("advantage_pos", "advantage_neg", "weight", "rollout_logprobs")
_ROW_TYPES = {name: "d" if name in _FLOATS else "i" for name in PackedRow.__slots__}


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tensor: `start[d] <= index < start[d] + extent[d]`. Example: Region((4, 0), (2, 8)) is rows 4 and 5 of [n, 8]."""

    start: tuple[int, ...]
    extent: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(map(operator.add, self.start, self.extent))

    @property
    def numel(self) -> int:
        return math.prod(self.extent)

    def intersect(self, other: Region) -> Region | None:
        """The common box, or None where there is none."""
        found = _box(tuple(map(max, self.start, other.start)), tuple(map(min, self.end, other.end)))
        return found if min(found.extent) > 0 else None

    def hull(self, other: Region) -> Region:
        """The smallest box around both."""
        return _box(tuple(map(min, self.start, other.start)), tuple(map(max, self.end, other.end)))

    def within(self, outer: Region) -> Region:
        """This box counted from the first element of `outer`, which holds it."""
        return Region(tuple(map(operator.sub, self.start, outer.start)), self.extent)

    def of(self, tensor: Any) -> Any:
        """A view of the box in a torch tensor."""
        for dim, (start, extent) in enumerate(zip(self.start, self.extent, strict=True)):
            tensor = tensor.narrow(dim, start, extent)
        return tensor


def _box(start: tuple[int, ...], end: tuple[int, ...]) -> Region:
    return Region(start, tuple(map(operator.sub, end, start)))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """What makes a set of weights whole: for each tensor the checksums of its fragments, in the sync plan's order.

    Example: WeightManifest(version=3, names=("lm_head.weight",), dtypes=("bfloat16",), shapes=((400, 128),), checksums=(("9f..", "03.."),))
    """

    version: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    checksums: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        _require_equal_lengths(
            "WeightManifest",
            names=len(self.names),
            dtypes=len(self.dtypes),
            shapes=len(self.shapes),
            checksums=len(self.checksums),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands after `step` finished steps; enough, with the checkpoint, to go on as if nothing had happened.

    `cursor` is the position in the shuffled prompts: (epoch, offset). Random numbers are drawn from generators keyed by
    `seed` and the step, so the step is all the random state there is outside the Megatron checkpoint.
    """

    step: int
    weight_version: int
    cursor: tuple[int, int]
    seed: int
