"""The one plan of a sync: for every engine rank, which fragments of which actor shards it needs, cut into buckets.

Pure: it knows what each actor rank holds (families/pieces.py) and what each mailbox must have (engine/slices.py), and nothing of
processes. A mailbox is a place that fragments are sent to: one engine rank, or memory that several ranks of a host read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron_arpo.engine.buckets import Bucket, Fragment, TensorPlace
from megatron_arpo.engine.slices import reload_group
from megatron_arpo.types import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPiece:
    """A box of the Hugging Face tensor `name` of `shape` that an actor rank holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    region: Region


Need = Callable[[str, tuple[int, ...]], Region]
"""(name, shape) -> what a mailbox must have of the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPlan:
    buckets: tuple[Bucket, ...]

    @property
    def model_bytes(self) -> int:
        return sum(place.num_bytes for bucket in self.buckets for place in bucket.places)

    @property
    def moved_bytes(self) -> int:
        """Bytes that reach mailboxes, counted once for each."""
        return sum(bucket.fragment_bytes(one) * len(one.mailboxes) for bucket in self.buckets for one in bucket.fragments)

    def tensors(self) -> list[TensorPlace]:
        return [place for bucket in self.buckets for place in bucket.places]


def make_plan(held: Sequence[Sequence[HeldPiece]], needs: Sequence[Need], bucket_bytes: int) -> SyncPlan:
    """`held[a]` is what actor rank a has, `needs[m]` what mailbox m must get. Tensors of one reload group share a bucket, also where
    they are more than `bucket_bytes`. Raises ValueError where the actors lack a part of a tensor that is needed."""
    holders = _holders(held)
    groups = [list(names) for _, names in groupby(_by_group(holders), key=reload_group)]
    load = [0] * len(held)
    packed = _packed(groups, holders, bucket_bytes)
    buckets = tuple(_bucket(index, names, holders, needs, load) for index, names in enumerate(packed))
    return SyncPlan(buckets=buckets)


@dataclass(slots=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    ranks: dict[Region, list[int]]
    """Actor ranks that hold a box."""

    @property
    def place_bytes(self) -> int:
        return self.place(0, "").num_bytes

    def place(self, offset: int, name: str) -> TensorPlace:
        return TensorPlace(name=name, dtype=self.dtype, shape=self.shape, offset=offset)


def _holders(held: Sequence[Sequence[HeldPiece]]) -> dict[str, _Tensor]:
    """By name, in the order in which the ranks have them."""
    found: dict[str, _Tensor] = {}
    for rank, pieces in enumerate(held):
        for piece in pieces:
            tensor = found.setdefault(piece.name, _Tensor(piece.dtype, piece.shape, {}))
            if (tensor.dtype, tensor.shape) != (piece.dtype, piece.shape):
                raise ValueError(f"{piece.name}: actor ranks disagree, {tensor.dtype} {tensor.shape} and {piece.dtype} {piece.shape}")
            if piece.region.numel:
                tensor.ranks.setdefault(piece.region, []).append(rank)
    for name, tensor in found.items():
        missing = Region.whole(tensor.shape).numel - sum(region.numel for region in tensor.ranks)
        if missing:
            raise ValueError(f"{name}: the actors hold {'too little' if missing > 0 else 'overlapping parts'} of it ({missing} elements)")
    return found


def _by_group(holders: Mapping[str, _Tensor]) -> list[str]:
    """Names with each group's tensors side by side, in the order in which groups first come."""
    order: dict[str, list[str]] = {}
    for name in holders:
        order.setdefault(reload_group(name), []).append(name)
    return [name for names in order.values() for name in names]


def _packed(groups: Sequence[Sequence[str]], holders: Mapping[str, _Tensor], bucket_bytes: int) -> list[list[str]]:
    """Names of each bucket: whole groups, as many as fit."""
    packed: list[list[str]] = []
    room = 0
    for names in groups:
        size = sum(holders[name].place_bytes for name in names)
        if not packed or size > room:
            packed.append([])
            room = bucket_bytes
        packed[-1].extend(names)
        room -= size
    return packed


def _bucket(index: int, names: Sequence[str], holders: Mapping[str, _Tensor], needs: Sequence[Need], load: list[int]) -> Bucket:
    """`load`, bytes that each actor rank sends, is counted on: of several ranks with the same box the least busy one sends it."""
    places: list[TensorPlace] = []
    fragments: list[Fragment] = []
    end = 0
    for name in sorted(names, key=lambda name: -holders[name].place(0, name).torch_dtype.itemsize):  # keeps every tensor aligned
        tensor = holders[name]
        places.append(tensor.place(end, name))
        end += places[-1].num_bytes
        mailboxes: dict[Region, list[int]] = {}
        for mailbox, need in enumerate(needs):
            mailboxes.setdefault(need(name, tensor.shape), []).append(mailbox)
        for region, ranks in tensor.ranks.items():
            actor = min(ranks, key=lambda rank: (load[rank], rank))
            for needed, to in mailboxes.items():
                if common := region.intersect(needed):
                    fragments.append(Fragment(tensor=len(places) - 1, region=common, actor=actor, mailboxes=tuple(to)))
                    load[actor] += common.numel * places[-1].torch_dtype.itemsize
    return Bucket(index=index, places=tuple(places), fragments=tuple(fragments))


def hull_of(needs: Sequence[Need]) -> Need:
    """What a mailbox must have that several engine ranks read from."""

    def need(name: str, shape: tuple[int, ...]) -> Region:
        first, *rest = [one(name, shape) for one in needs]
        for other in rest:
            first = first.hull(other)
        return first

    return need


def fragments_of(bucket: Bucket, rank: int) -> list[Fragment]:
    """What actor rank `rank` sends of a bucket."""
    return [fragment for fragment in bucket.fragments if fragment.actor == rank]


def merge_checksums(bucket: Bucket, by_rank: Sequence[Sequence[str]]) -> list[str] | None:
    """One for each of the bucket's fragments from what each rank gave for those it sent; None where there are none."""
    if not any(by_rank):
        return None
    found = [iter(checksums) for checksums in by_rank]
    return [next(found[fragment.actor]) for fragment in bucket.fragments]
