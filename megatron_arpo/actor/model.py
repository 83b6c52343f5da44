"""Builds the Megatron GPTModel of a Hugging Face architecture, with tree attention in its layer spec."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_arpo.actor.attention import PositionedRotaryEmbedding, TreeCoreAttention
from megatron_arpo.families.architecture import Architecture

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RMSNorm(torch.nn.Module):
    """RMSNorm in float32, accepted by Megatron's layer specs where neither Transformer Engine nor Apex is installed."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype) * self.weight


def transformer_config(architecture: Architecture, dtype: torch.dtype, tp: int, pp: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_kv_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,  # Megatron then leaves the loss unscaled: denominators are global and ours
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # asked for by variable_seq_lengths, in dense models too
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,  # with True, interleaved pipelines are silently wrong over gloo
        deallocate_pipeline_outputs=False,
    )


def _layer_spec(config: TransformerConfig) -> Any:
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = TreeCoreAttention
    return spec


def build_model(config: TransformerConfig, architecture: Architecture) -> torch.nn.Module:
    """This rank's part of the model, weights not yet loaded. Needs initialised parallel_state."""
    block = TransformerBlockSubmodules(layer_specs=[_layer_spec(config)] * get_num_layers_to_build(config), layer_norm=RMSNorm)
    model = GPTModel(
        config,
        block,
        vocab_size=architecture.padded_vocab_size(config.tensor_model_parallel_size),
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=architecture.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
        parallel_output=True,
    )
    model.rotary_pos_emb = PositionedRotaryEmbedding(
        architecture.head_dim, rotary_percent=1.0, rotary_base=architecture.rope_theta, use_cpu_initialization=True
    )
    return Float16Module(config, model) if config.bf16 else model


def unwrap(model: torch.nn.Module) -> GPTModel:
    while not isinstance(model, GPTModel):
        model = model.module
    return model
