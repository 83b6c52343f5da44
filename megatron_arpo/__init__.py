"""Agentic reinforcement learning of large models on Megatron-Core."""

__version__ = "0.1.0"
