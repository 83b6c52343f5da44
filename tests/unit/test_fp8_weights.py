"""FP8 blocks with factors, made piece by piece, are those of the whole tensor."""

from __future__ import annotations

import pytest
import torch

from megatron_arpo.families.pieces import Piece
from megatron_arpo.types import Region
from megatron_arpo.weights.fp8 import BLOCK, dequantize, is_quantized, quantize, quantized_pieces, scale_region

NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 200), (1, 1)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_there_and_back_within_rounding(shape: tuple[int, int], scale: float) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale
    found, factors = quantize(weight)
    assert found.dtype == torch.float8_e4m3fn and found.shape == shape
    assert factors.shape == (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
    error = (dequantize(found, factors) - weight).abs()
    assert (error <= weight.abs() / 16 + factors.max() * 2**-10).all(), "3 bits of mantissa"
    assert found.float().abs().max() == 448.0, "the largest value of a block is FP8's largest"


def test_a_hand_computed_block() -> None:
    found, factors = quantize(torch.tensor([[448.0, -224.0], [0.0, 28.0]]) * 2)
    assert factors.tolist() == [[2.0]] and found.float().tolist() == [[448.0, -224.0], [0.0, 28.0]]


def test_zeros_stay_zeros() -> None:
    found, factors = quantize(torch.zeros(4, 4))
    assert (dequantize(found, factors) == 0).all() and factors.isfinite().all()


def test_pieces_are_parts_of_the_whole() -> None:
    weight = torch.randn(512, 300, generator=torch.Generator().manual_seed(1))
    whole, factors = quantize(weight)
    for rank in range(2):
        region = Region((rank * 256, 0), (256, 300))
        part, part_factors = quantized_pieces(NAME, Piece((512, 300), region, region.of(weight)))
        assert torch.equal(part.blocks.view(torch.uint8), region.of(whole).view(torch.uint8))
        assert part_factors.shape == (4, 3) and torch.equal(part_factors.blocks, part_factors.region.of(factors))


def test_a_cut_through_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engine.fp8: actor.layout cuts .*up_proj.weight of 192 at 96:192, through a block of 128"):
        scale_region(NAME, (192, 128), Region((96, 0), (96, 128)))


def test_which_tensors() -> None:
    assert is_quantized(NAME) and is_quantized("model.layers.3.mlp.experts.7.down_proj.weight")
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.gate.weight", "model.layers.0.self_attn.q_proj.bias"):
        assert not is_quantized(name)
