"""The plan of a weight sync: every engine rank gets what it needs, once, from actors that hold it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_arpo.engine.buckets import buckets_of, checksum, plain
from megatron_arpo.engine.slices import kept_region, reload_group
from megatron_arpo.families.architecture import Architecture, Experts
from megatron_arpo.families.names import hf_names, shard, to_megatron
from megatron_arpo.families.pieces import Piece, pieces
from megatron_arpo.types import Region
from megatron_arpo.weights.plan import HeldPiece, Need, SyncPlan, hull_of, make_plan

ARCHITECTURE = Architecture(
    family="qwen2", num_layers=2, hidden_size=8, ffn_hidden_size=24, num_heads=8, num_kv_heads=4, head_dim=2, vocab_size=301,
    tied_embeddings=False, norm_eps=1e-6, rope_theta=1e4, max_positions=64, qkv_bias=True, qk_norm=True,
    experts=Experts(num_experts=2, num_active=1, ffn_hidden_size=8, normalize_weights=True),
)  # fmt: skip
PARAMETERS = [
    ("embedding.word_embeddings.weight", None, None),
    *((name, layer, None) for layer in range(2) for name in (
        "input_layernorm.weight", "self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias",
        "self_attention.q_layernorm.weight", "self_attention.linear_proj.weight", "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight", "mlp.router.weight")),
    *((name, 1, expert) for expert in range(2) for name in ("mlp.experts.linear_fc1.weight", "mlp.experts.linear_fc2.weight")),
    ("decoder.final_layernorm.weight", None, None),
    ("output_layer.weight", None, None),
]  # fmt: skip


def hf_shape(name: str) -> tuple[int, ...]:
    a, f = ARCHITECTURE, 8 if "experts" in name else 24
    heads = {"q_proj": 16, "k_proj": 8, "v_proj": 8}
    part = name.split(".")[-2]
    match part:
        case "embed_tokens" | "lm_head":
            return (a.vocab_size, a.hidden_size)
        case "q_proj" | "k_proj" | "v_proj":
            return (heads[part], a.hidden_size) if name.endswith("weight") else (heads[part],)
        case "o_proj":
            return (a.hidden_size, 16)
        case "gate_proj" | "up_proj":
            return (f, a.hidden_size)
        case "down_proj":
            return (a.hidden_size, f)
        case "gate":
            return (2, a.hidden_size)
        case "q_norm":
            return (a.head_dim,)
    return (a.hidden_size,)


def model() -> dict[str, torch.Tensor]:
    """Every number stands once, in tensors of two kinds."""
    names = [name for parameter in PARAMETERS for name in hf_names(*parameter)]
    sizes = [torch.Size(hf_shape(name)).numel() for name in names]
    values = torch.arange(1.0, sum(sizes) + 1).split(sizes)
    made = {name: part.view(hf_shape(name)) for name, part in zip(names, values, strict=True)}
    return {name: tensor.double() if "router" in name or "gate.weight" in name else tensor for name, tensor in made.items()}


def held_by(tensors: dict[str, torch.Tensor], tp: int, rank: int) -> dict[str, Piece]:
    found: dict[str, Piece] = {}
    for name, layer, expert in PARAMETERS:
        names = hf_names(name, layer, expert)
        whole = to_megatron(name, {one: tensors[one] for one in names}, ARCHITECTURE, tp)
        local = shard(name, whole, tp, rank).contiguous()
        found |= dict(zip(names, pieces(name, local, ARCHITECTURE, tp, rank), strict=True))
    return found


def as_held(found: dict[str, Piece]) -> list[HeldPiece]:
    return [
        HeldPiece(name=name, dtype=str(piece.blocks.dtype).removeprefix("torch."), shape=piece.shape, region=piece.region)
        for name, piece in found.items()
    ]


def needs_of(tp: int) -> list[Need]:
    return [lambda name, shape, rank=rank: kept_region(name, shape, ARCHITECTURE.num_kv_heads, tp, rank) for rank in range(tp)]


def deliver(plan: SyncPlan, actors: list[dict[str, Piece]], mailbox: int) -> dict[str, torch.Tensor]:
    """What a mailbox has in the end; NaN where nothing came."""
    found = {}
    for bucket in plan.buckets:
        buffer = torch.full((bucket.num_bytes // 4,), float("nan")).view(torch.uint8)
        for fragment in bucket.fragments:
            if mailbox in fragment.mailboxes:
                piece = actors[fragment.actor][bucket.places[fragment.tensor].name]
                target, box = bucket.fragment_view(buffer, fragment), fragment.region.within(piece.region)
                piece.copy_to(target, box)
                source = piece.view(box)
                assert source is None or checksum(source) == checksum(target), "the sender's sum is the receiver's"
        for place in bucket.places:
            found[place.name] = buffer[place.offset : place.offset + place.num_bytes].view(place.torch_dtype).view(place.shape)
    return found


@pytest.mark.parametrize("actor_tp", [1, 2, 4])
@pytest.mark.parametrize("engine_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("bucket_bytes", [1, 4096, 2**30])
def test_every_engine_rank_gets_its_slices(actor_tp: int, engine_tp: int, bucket_bytes: int) -> None:
    tensors = model()
    actors = [held_by(tensors, actor_tp, rank) for rank in range(actor_tp)]
    needs = needs_of(engine_tp)
    plan = make_plan([as_held(actor) for actor in actors], needs, bucket_bytes)
    assert sorted(place.name for place in plan.tensors()) == sorted(tensors)
    assert buckets_of(plain(plan.buckets)) == plan.buckets
    needed = 0
    for rank, need in enumerate(needs):
        got = deliver(plan, actors, rank)
        for name, tensor in tensors.items():
            region = need(name, tuple(tensor.shape))
            assert torch.equal(region.of(got[name]), region.of(tensor)), name
            needed += region.numel * tensor.element_size()
    assert plan.moved_bytes == needed, "not a byte twice"


def test_memory_that_several_ranks_read_gets_the_model_once() -> None:
    tensors = model()
    actors = [held_by(tensors, 2, rank) for rank in range(2)]
    plan = make_plan([as_held(actor) for actor in actors], [hull_of([*needs_of(4), *needs_of(1)])], 4096)
    assert plan.moved_bytes == plan.model_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert all(torch.equal(got, tensors[name]) for name, got in deliver(plan, actors, 0).items())


def test_copies_share_the_work() -> None:
    tensors = model()
    actors = [as_held(held_by(tensors, 1, 0))] * 4
    plan = make_plan(actors, needs_of(1), 2**30)
    sent = [0] * 4
    for bucket in plan.buckets:
        for fragment in bucket.fragments:
            sent[fragment.actor] += bucket.fragment_bytes(fragment)
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert max(sent) <= sum(sent) / 4 + largest


def test_layers_of_an_engine_are_not_torn() -> None:
    plan = make_plan([as_held(held_by(model(), 1, 0))], needs_of(1), 1)
    groups = [{reload_group(place.name) for place in bucket.places} for bucket in plan.buckets]
    assert all(len(group) == 1 for group in groups) and len(groups) == len(set.union(*groups))
    assert {"model.layers.1.mlp.experts", "model.layers.0.self_attn.qkv_proj", "lm_head"} <= set.union(*groups)


def test_a_part_that_no_actor_holds_is_named() -> None:
    found = as_held(held_by(model(), 2, 0))
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight: the actors hold too little"):
        make_plan([found], needs_of(1), 4096)


def test_more_ranks_than_heads_keep_the_same_head() -> None:
    kept = partial(kept_region, "model.layers.0.self_attn.k_proj.weight", (8, 8), 4, 8)
    assert [kept(rank).start[0] for rank in range(8)] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert kept_region("lm_head.weight", (301, 8), 4, 8, 7) == Region((280, 0), (21, 8))


boxes = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=2, max_size=2)


@given(boxes, boxes)
@settings(max_examples=100, deadline=None)
def test_common_boxes_are_those_of_masks(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    a, b = (Region(tuple(start for start, _ in box), tuple(extent for _, extent in box)) for box in (one, other))
    mask_a, mask_b = torch.zeros(12, 12, dtype=bool), torch.zeros(12, 12, dtype=bool)
    a.of(mask_a)[:] = True
    b.of(mask_b)[:] = True
    common = a.intersect(b)
    assert (common.numel if common else 0) == int((mask_a & mask_b).sum())
    if common:
        assert common.within(a).of(a.of(mask_b)).all()
    assert a.hull(b).of(mask_a | mask_b).sum() == (mask_a | mask_b).sum()


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]), st.data())
@settings(max_examples=60, deadline=None)
def test_a_checksum_sees_every_change(rows: int, columns: int, dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = torch.arange(rows * columns).remainder(251).to(dtype).view(rows, columns)
    expected = checksum(tensor)
    wide = torch.zeros(rows, columns + 8, dtype=dtype)
    wide[:, 8:] = tensor
    assert checksum(wide[:, 8:]) == expected, "where it lies does not matter"
    at = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    changed = tensor.clone()
    changed.view(torch.uint8)[at[0], at[1] * tensor.element_size()] ^= data.draw(st.integers(1, 255))
    assert checksum(changed) != expected


def test_a_checksum_sees_moved_rows_and_columns() -> None:
    tensor = torch.randn(16, 256)
    assert len({checksum(tensor), checksum(tensor.flip(0)), checksum(tensor.roll(1, 0)), checksum(tensor.roll(128, 1))}) == 4
    assert checksum(tensor.view(4, 4, 256)) == checksum(tensor)
