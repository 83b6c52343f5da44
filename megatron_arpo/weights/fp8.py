"""Linear weights in FP8 blocks for the engines, made from an actor's bf16 shards on the way to them.

The format of published FP8 checkpoints: float8_e4m3fn with one float32 factor for each block of 128 x 128 (`weight_scale_inv`), so that
weight = fp8 * factor. Embeddings, output layer, norms and routers stay as they are.
"""

from __future__ import annotations

import re

import torch

from megatron_arpo.families.pieces import Piece
from megatron_arpo.types import Region

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
_LINEAR = re.compile(r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)\.weight")
_DTYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(_DTYPE).max


def is_quantized(name: str) -> bool:
    return _LINEAR.fullmatch(name) is not None


def scale_region(name: str, shape: tuple[int, ...], region: Region) -> tuple[tuple[int, ...], Region]:
    """(shape, region) of the factors of a box of weight `name`. Raises ValueError where the box cuts through a block."""
    for start, end, size in zip(region.start, region.end, shape, strict=True):
        if start % BLOCK or (end % BLOCK and end != size):
            raise ValueError(
                f"engine.fp8: actor.layout cuts {name} of {size} at {start}:{end}, through a block of {BLOCK}; use a smaller tp or no fp8"
            )
    start = tuple(first // BLOCK for first in region.start)
    end = tuple(-(-last // BLOCK) for last in region.end)
    scales = tuple(-(-size // BLOCK) for size in shape)
    return scales, Region(start, tuple(b - a for a, b in zip(start, end, strict=True)))


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, columns] -> float8_e4m3fn of that shape and float32 factors [ceil(rows / 128), ceil(columns / 128)]."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    factors = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / _LARGEST
    scaled = (blocks / factors[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return scaled.to(_DTYPE), factors


def dequantize(weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The float32 weight [rows, columns] that `quantize` made FP8 of, but for rounding."""
    rows, columns = weight.shape
    wide = factors.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return weight.float() * wide


def quantized_pieces(name: str, piece: Piece) -> tuple[Piece, Piece]:
    """The FP8 weight and its factors in place of a piece of weight `name`."""
    shape, region = scale_region(name, piece.shape, piece.region)
    weight, factors = quantize(piece.blocks.reshape(piece.region.extent))
    return Piece(piece.shape, piece.region, weight), Piece(shape, region, factors)
