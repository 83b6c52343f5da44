"""What the checks run on: the widths of a 7B model on a card, toys in a dry run on CPU."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from megatron_arpo.batch.flat import pack_sequences
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.types import PackedRow

TOY = Architecture(
    family="qwen2", num_layers=2, hidden_size=64, ffn_hidden_size=96, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=300,
    tied_embeddings=False, norm_eps=1e-6, rope_theta=1e6, max_positions=32768, qkv_bias=True, qk_norm=False,
)  # fmt: skip
WIDE = replace(
    TOY, hidden_size=3584, ffn_hidden_size=18944, num_heads=28, num_kv_heads=4, head_dim=128, vocab_size=152_064
)  # fmt: skip
"""Qwen2.5-7B's layers and vocabulary; how many layers fit depends on the check."""
MEDIUM = replace(TOY, num_layers=4, hidden_size=512, ffn_hidden_size=1408, num_heads=8, num_kv_heads=4, head_dim=64, vocab_size=4096)
"""Small enough for a float64 reference on CPU."""


def wide(device: torch.device, num_layers: int) -> Architecture:
    return replace(WIDE, num_layers=num_layers) if device.type == "cuda" else TOY


def medium(device: torch.device) -> Architecture:
    return MEDIUM if device.type == "cuda" else TOY


def sequences(num: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Token ids with something to learn: each follows from the one before, but for one in eight."""
    draw = random.Random(seed)
    found = []
    for _ in range(num):
        ids = [draw.randrange(vocab_size)]
        while len(ids) < length:
            ids.append(draw.randrange(vocab_size) if draw.random() < 0.125 else (ids[-1] * 31 + 7) % vocab_size)
        found.append(ids)
    return found


def rows_of(found: list[list[int]], max_row_tokens: int) -> list[PackedRow]:
    """All tokens in the loss, which is their mean."""
    num_targets = sum(len(ids) - 1 for ids in found)
    return pack_sequences([(ids, [1] * len(ids)) for ids in found], 1.0 / num_targets, max_row_tokens)
