"""Rotary angles at the positions of a packed row, where siblings of a tree have equal positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_arpo.families.architecture import RopeScaling


class PositionedRotaryEmbedding(RotaryEmbedding):
    """Megatron's rotary embedding at the positions of the current row instead of at its indices; `set_positions` comes before
    each forward."""

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__(head_dim, rotary_percent=1.0, rotary_base=theta, use_cpu_initialization=True)
        if scaling is not None:
            self.inv_freq = scaled_frequencies(self.inv_freq, scaling)

    def set_positions(self, positions_T: torch.Tensor) -> None:
        self._positions_T = positions_T

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> torch.Tensor:
        """Returns angles [T, 1, 1, d]."""
        angles = torch.outer(self._positions_T.to(self.inv_freq.dtype), self.inv_freq.to(self._positions_T.device))
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def scaled_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1's frequencies (arXiv 2407.21783, sec. 3.4.1): those that turn less than `low_freq_factor` times within the original
    context are divided by `factor`, those that turn more than `high_freq_factor` times stay, and between the two it is linear."""
    turns = scaling.original_max_positions * frequencies / (2.0 * math.pi)
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)
