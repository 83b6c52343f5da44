"""Share of the card's own matrix rate that an update of a 7B model's layers reaches."""

from __future__ import annotations

import torch

from megatron_arpo.actor.kernels import transformer_engine_obstacle
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.families.flops import key_flops, token_flops
from tests.gpu.models import free, median_seconds, random_weights, with_weights
from tests.gpu.rows import Recorder
from tests.gpu.sizes import rows_of, sequences, wide

SHAPES = ((8192, 8192, 8192), (16384, 8192, 8192), (8192, 3584, 18944), (8192, 18944, 3584), (16384, 16384, 16384))
"""Of bf16 products; the best of them is the card's rate."""


def matmul_flops_per_s(device: torch.device, shapes: tuple[tuple[int, int, int], ...]) -> float:
    """Of random data: zeros draw less power and run faster."""
    best = 0.0
    for rows, inner, columns in shapes:
        left, right = (torch.randn(size, device=device, dtype=torch.bfloat16) for size in ((rows, inner), (inner, columns)))

        def ten_times(left: torch.Tensor = left, right: torch.Tensor = right) -> None:
            for _ in range(10):
                left @ right

        best = max(best, 10 * 2.0 * rows * inner * columns / median_seconds(ten_times))
    return best


def update_flops(architecture: Architecture, num_rows: int, length: int) -> float:
    """What the model needs for rows of one path each: no recomputation is counted, and only the keys that causal attention sees."""
    return num_rows * (length * token_flops(architecture) + length * (length + 1) / 2 * key_flops(architecture))


def update_flops_per_s(device: torch.device, architecture: Architecture, num_rows: int, length: int, transformer: str) -> float:
    updater = with_weights(architecture, torch.bfloat16, random_weights(architecture, torch.bfloat16), transformer=transformer)
    rows = rows_of(sequences(num_rows, length, architecture.vocab_size), length)
    seconds = median_seconds(lambda: updater.sft_step(rows))
    free(updater)
    return update_flops(architecture, num_rows, length) / seconds


def test_model_flops_utilisation(record: Recorder, device: torch.device) -> None:
    card = device.type == "cuda"
    rate = matmul_flops_per_s(device, SHAPES if card else ((64, 64, 64),))
    record("bf16 matrix products, TFLOP/s", rate / 1e12, of_card=True, note="best of five shapes")
    architecture = wide(device, num_layers=6)
    num_rows, length = (4, 8192) if card else (2, 32)
    for transformer in ("local", "transformer_engine"):
        name = f"bf16 update of a 7B model's layers, {transformer}: share of that rate"
        obstacle = transformer_engine_obstacle() if transformer == "transformer_engine" else None
        if obstacle:
            record.not_installed(name, obstacle)
            continue
        reached = update_flops_per_s(device, architecture, num_rows, length, transformer)
        note = f"{reached / 1e12:.1f} TFLOP/s, {num_rows} rows of {length} tokens, optimizer included"
        record(name, reached / rate, at_least=0.45, of_card=True, note=note)
