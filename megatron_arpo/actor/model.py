"""Builds the Megatron GPTModel of a Hugging Face architecture, with tree attention in its layer spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_arpo.actor.attention import TreeCoreAttention
from megatron_arpo.actor.device import on_cuda
from megatron_arpo.actor.kernels import LayerImplementation, has_fused_weight_gradient, layer_implementation
from megatron_arpo.actor.rotary import PositionedRotaryEmbedding
from megatron_arpo.config.actor import ActorSettings, Fp8Settings, LayoutSettings, RecomputeSettings
from megatron_arpo.families.architecture import Architecture, Experts

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


class PolicyModel(GPTModel):
    """A GPTModel whose last stage ends at the normed hidden states [T, 1, hidden].

    Full logits [T, V] then never exist: actor/target_logprobs.py makes them chunk by chunk, for trained tokens only.
    """

    def _postprocess(self, hidden_states: torch.Tensor, **_options: Any) -> torch.Tensor:
        return hidden_states

    @property
    def output_weight(self) -> torch.Tensor:
        """[V on this rank, hidden] on the last stage, shared with the embedding where the model ties them."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def transformer_config(architecture: Architecture, dtype: torch.dtype, actor: ActorSettings) -> TransformerConfig:
    """Raises ValueError where the settings ask for kernels that are not here."""
    cuda, implementation = on_cuda(), layer_implementation(actor)
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
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,  # Megatron then leaves the loss unscaled: denominators are global and ours
        # in an interleaved pipeline Megatron mixes up the two directions' shapes; actor/update.py makes rows of one length there
        variable_seq_lengths=actor.layout.vpp == 1,
        moe_token_dispatcher_type="alltoall",  # asked for by variable_seq_lengths, in dense models too
        use_cpu_initialization=not cuda,
        gradient_accumulation_fusion=cuda and (implementation == "transformer_engine" or has_fused_weight_gradient()),
        masked_softmax_fusion=False,
        bias_activation_fusion=cuda,
        bias_dropout_fusion=cuda,
        apply_rope_fusion=False,
        persist_layer_norm=cuda,
        batch_p2p_comm=False,  # with True, interleaved pipelines are silently wrong over gloo
        overlap_p2p_comm=cuda and actor.layout.vpp > 1,
        deallocate_pipeline_outputs=False,
        **_layout_options(actor.layout),
        **_recompute_options(actor.recompute),
        **_expert_options(architecture.experts, implementation),
        **_fp8_options(actor.fp8),
    )


def _layout_options(layout: LayoutSettings) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def _recompute_options(recompute: RecomputeSettings | None) -> dict[str, Any]:
    if recompute is None:
        return {}
    if recompute.granularity == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": recompute.layers}
    return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}


def _expert_options(experts: Experts | None, implementation: LayerImplementation) -> dict[str, Any]:
    """No auxiliary loss and no dropped tokens: the gradient of a tree batch is then exactly that of the flat batch."""
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num_experts,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_router_topk": experts.num_active,
        "moe_router_pre_softmax": not experts.normalize_weights,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": implementation == "transformer_engine",
    }


def _fp8_options(fp8: Fp8Settings | None) -> dict[str, Any]:
    if fp8 is None:
        return {}
    return {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        "first_last_layers_bf16": fp8.first_last_layers_bf16,
        "num_layers_at_start_in_bf16": int(fp8.first_last_layers_bf16),
        "num_layers_at_end_in_bf16": int(fp8.first_last_layers_bf16),
    }


def _block_spec(config: TransformerConfig, implementation: LayerImplementation, num_layers: int) -> TransformerBlockSubmodules:
    options = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
    }
    if implementation == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        layer, final_norm = get_gpt_layer_with_transformer_engine_spec(**options), TENorm
    else:
        layer, final_norm = get_gpt_layer_local_spec(**options, normalization=config.normalization), RMSNorm
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        if config.qk_layernorm:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        if config.num_moe_experts:  # Megatron names this norm as if it were fused into a dense MLP, Transformer Engine's layers do not
            del layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    layer.submodules.self_attention.submodules.core_attention = TreeCoreAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=final_norm)


def build_model(config: TransformerConfig, architecture: Architecture, implementation: LayerImplementation) -> list[torch.nn.Module]:
    """This rank's model chunks, in order of depth: one, or `vpp` of them. Weights are not loaded yet; parallel_state must be
    initialised."""
    if implementation == "transformer_engine":
        # megatron-core 0.16.1 wants Apex for gradient accumulation fusion in its output layer, which is never run here; Transformer
        # Engine's layers bring their own
        layers._grad_accum_fusion_available = True
    num_chunks = config.virtual_pipeline_model_parallel_size
    stages = [None] if num_chunks is None else list(range(num_chunks))
    return [_build_chunk(config, architecture, implementation, stage) for stage in stages]


def _build_chunk(
    config: TransformerConfig, architecture: Architecture, implementation: LayerImplementation, vp_stage: int | None
) -> torch.nn.Module:
    model = PolicyModel(
        config,
        _block_spec(config, implementation, get_num_layers_to_build(config, vp_stage=vp_stage)),
        vocab_size=architecture.padded_vocab_size(config.tensor_model_parallel_size),
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        share_embeddings_and_output_weights=architecture.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
        parallel_output=True,
        vp_stage=vp_stage,
    )
    model.rotary_pos_emb = PositionedRotaryEmbedding(architecture.head_dim, architecture.rope_theta, architecture.rope_scaling)
    if on_cuda():
        model.cuda(torch.cuda.current_device())
    return Float16Module(config, model) if config.bf16 else model


def unwrap(chunk: torch.nn.Module) -> PolicyModel:
    while not isinstance(chunk, PolicyModel):
        chunk = chunk.module
    return chunk


def unwrap_all(chunks: Sequence[torch.nn.Module]) -> list[PolicyModel]:
    return [unwrap(chunk) for chunk in chunks]
