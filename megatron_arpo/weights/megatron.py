"""Walks a Megatron model's parameters under the names and global layers that families/ knows; loads and gathers them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from megatron_arpo.families.architecture import Architecture
from megatron_arpo.families.names import hf_names, is_sharded, shard, to_hf, to_megatron, unshard

_LAYER_PREFIX = "decoder.layers."


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """`name` without its layer prefix; `layer` counts over the whole model, None outside the layers."""

    name: str
    layer: int | None
    value: torch.nn.Parameter


def named_parameters(model: GPTModel) -> Iterator[NamedParameter]:
    for name, parameter in model.named_parameters():
        if name.startswith(_LAYER_PREFIX):
            index, _, short = name.removeprefix(_LAYER_PREFIX).partition(".")
            yield NamedParameter(short, model.decoder.layers[int(index)].layer_number - 1, parameter)
        else:
            yield NamedParameter(name, None, parameter)


@torch.no_grad()
def load_hf_weights(model: GPTModel, architecture: Architecture, read: Callable[[str], torch.Tensor]) -> None:
    """Fills this rank's parameters; `read` gives a whole Hugging Face tensor by name. Raises ValueError for a wrong shape."""
    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    for parameter in named_parameters(model):
        names = hf_names(parameter.name, parameter.layer)
        if names == ("lm_head.weight",) and architecture.tied_embeddings:
            names = hf_names("embedding.word_embeddings.weight", None)
        whole = to_megatron(parameter.name, {name: read(name) for name in names}, architecture, tp)
        mine = shard(parameter.name, whole, tp, rank)
        if mine.shape != parameter.value.shape:
            raise ValueError(
                f"{' + '.join(names)}: shape {tuple(mine.shape)} on this rank does not match config.json, "
                f"which asks for {tuple(parameter.value.shape)}"
            )
        parameter.value.copy_(mine)


@torch.no_grad()
def gather_hf_weights(model: GPTModel, architecture: Architecture) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole Hugging Face tensors of this pipeline stage, one Megatron parameter at a time. A collective over the
    tensor-parallel ranks: all must run it to the end. Tied output weights are left out."""
    tp, group = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_group()
    for parameter in named_parameters(model):
        if parameter.name == "output_layer.weight" and architecture.tied_embeddings:
            continue
        mine = parameter.value.detach()
        shards = [mine]
        if tp > 1 and is_sharded(parameter.name):
            shards = [torch.empty_like(mine) for _ in range(tp)]
            torch.distributed.all_gather(shards, mine.contiguous(), group=group)
        yield from to_hf(parameter.name, parameter.layer, unshard(parameter.name, shards), architecture).items()
