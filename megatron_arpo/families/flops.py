"""What a token costs in training, from the architecture alone."""

from __future__ import annotations

from megatron_arpo.families.architecture import Architecture

_FORWARD_AND_BACKWARD = 3
"""The backward pass makes two products for each one of the forward pass."""


def token_flops(architecture: Architecture) -> float:
    """Floating-point operations, forward and backward, of one token without its attention to keys; output layer included."""
    hidden, heads = architecture.hidden_size, architecture.head_dim * architecture.num_heads
    attention = hidden * (2 * heads + 2 * architecture.head_dim * architecture.num_kv_heads)
    if architecture.experts is None:
        mlp = 3 * hidden * architecture.ffn_hidden_size
    else:
        experts = architecture.experts
        mlp = hidden * (3 * experts.ffn_hidden_size * experts.num_active + experts.num_experts)
    multiply_adds = architecture.num_layers * (attention + mlp) + hidden * architecture.vocab_size
    return 2.0 * _FORWARD_AND_BACKWARD * multiply_adds


def key_flops(architecture: Architecture) -> float:
    """Floating-point operations, forward and backward, of one token for each key that it sees."""
    return 2.0 * _FORWARD_AND_BACKWARD * 2 * architecture.head_dim * architecture.num_heads * architecture.num_layers
