"""Every parameter of a Megatron model, whatever its layout, and the shapes of the Hugging Face tensors that it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_arpo.families.architecture import Architecture
from megatron_arpo.families.names import hf_names


@dataclass(frozen=True, slots=True)
class Parameter:
    """`name` is canonical and without its layer prefix; `layer` and `expert` count over the whole model, None outside of them.

    Example: Parameter("self_attention.linear_qkv.weight", 3, None) is made of q_proj, k_proj and v_proj of layer 3.
    """

    name: str
    layer: int | None
    expert: int | None

    @property
    def hf_names(self) -> tuple[str, ...]:
        return hf_names(self.name, self.layer, self.expert)


def all_parameters(architecture: Architecture) -> Iterator[Parameter]:
    """In order of depth. Tied output weights are left out."""
    yield Parameter("embedding.word_embeddings.weight", None, None)
    for layer in range(architecture.num_layers):
        for name in _layer_names(architecture):
            yield Parameter(name, layer, None)
        for expert in range(architecture.experts.num_experts if architecture.experts else 0):
            for name in ("mlp.experts.linear_fc1.weight", "mlp.experts.linear_fc2.weight"):
                yield Parameter(name, layer, expert)
    yield Parameter("decoder.final_layernorm.weight", None, None)
    if not architecture.tied_embeddings:
        yield Parameter("output_layer.weight", None, None)


def _layer_names(architecture: Architecture) -> list[str]:
    names = ["input_layernorm.weight", "self_attention.linear_qkv.weight"]
    if architecture.qkv_bias:
        names.append("self_attention.linear_qkv.bias")
    if architecture.qk_norm:
        names += ["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"]
    names += ["self_attention.linear_proj.weight", "pre_mlp_layernorm.weight"]
    return names + (["mlp.router.weight"] if architecture.experts else ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight"])


def hf_shapes(name: str, architecture: Architecture) -> tuple[tuple[int, ...], ...]:
    """Of the Hugging Face tensors that make up the parameter, in the order of `hf_names`."""
    hidden, ffn = architecture.hidden_size, architecture.ffn_hidden_size
    query, key = architecture.num_heads * architecture.head_dim, architecture.num_kv_heads * architecture.head_dim
    experts = architecture.experts
    match name.removesuffix(".weight"):
        case "embedding.word_embeddings" | "output_layer":
            return ((architecture.vocab_size, hidden),)
        case "decoder.final_layernorm" | "input_layernorm" | "pre_mlp_layernorm":
            return ((hidden,),)
        case "self_attention.linear_qkv":
            return ((query, hidden), (key, hidden), (key, hidden))
        case "self_attention.linear_qkv.bias":
            return ((query,), (key,), (key,))
        case "self_attention.q_layernorm" | "self_attention.k_layernorm":
            return ((architecture.head_dim,),)
        case "self_attention.linear_proj":
            return ((hidden, query),)
        case "mlp.linear_fc1":
            return ((ffn, hidden), (ffn, hidden))
        case "mlp.linear_fc2":
            return ((hidden, ffn),)
        case "mlp.router":
            return ((experts.num_experts, hidden),)
        case "mlp.experts.linear_fc1":
            return ((experts.ffn_hidden_size, hidden),) * 2
        case "mlp.experts.linear_fc2":
            return ((hidden, experts.ffn_hidden_size),)
    raise KeyError(name)
