"""Walks a Megatron model's parameters under the names, global layers and global experts that families/ knows, and loads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from megatron_arpo.families.architecture import Architecture
from megatron_arpo.families.names import canonical, hf_names, shard, to_megatron

_LAYER_PREFIX = "decoder.layers."


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """`name` is canonical and without its layer prefix; `layer` and `expert` count over the whole model, None outside of them."""

    name: str
    layer: int | None
    expert: int | None
    value: torch.nn.Parameter

    @property
    def hf_names(self) -> tuple[str, ...]:
        return hf_names(self.name, self.layer, self.expert)

    @property
    def tensor_parallel_group(self) -> torch.distributed.ProcessGroup:
        """The ranks that hold the slices of this parameter."""
        if self.expert is not None:
            return parallel_state.get_expert_tensor_parallel_group()
        return parallel_state.get_tensor_model_parallel_group()


def named_parameters(chunks: Sequence[GPTModel], architecture: Architecture) -> Iterator[NamedParameter]:
    """Of all model chunks of this rank, in order."""
    num_local = architecture.experts.num_experts // parallel_state.get_expert_model_parallel_world_size() if architecture.experts else 0
    first_expert = num_local * parallel_state.get_expert_model_parallel_rank()
    for model in chunks:
        for name, parameter in model.named_parameters():
            if not name.startswith(_LAYER_PREFIX):
                yield NamedParameter(name, None, None, parameter)
                continue
            index, _, short = name.removeprefix(_LAYER_PREFIX).partition(".")
            layer = model.decoder.layers[int(index)].layer_number - 1
            short, local_expert = canonical(short)
            yield NamedParameter(short, layer, None if local_expert is None else first_expert + local_expert, parameter)


@torch.no_grad()
def load_hf_weights(chunks: Sequence[GPTModel], architecture: Architecture, read: Callable[[str], torch.Tensor]) -> None:
    """Fills this rank's parameters; `read` gives a whole Hugging Face tensor by name. Raises ValueError for a wrong shape."""
    vocabulary_tp = parallel_state.get_tensor_model_parallel_world_size()
    for parameter in named_parameters(chunks, architecture):
        names = parameter.hf_names
        if names == ("lm_head.weight",) and architecture.tied_embeddings:
            names = hf_names("embedding.word_embeddings.weight", None)
        whole = to_megatron(parameter.name, {name: read(name) for name in names}, architecture, vocabulary_tp)
        group = parameter.tensor_parallel_group
        mine = shard(parameter.name, whole, group.size(), group.rank())
        if mine.shape != parameter.value.shape:
            raise ValueError(
                f"{' + '.join(names)}: shape {tuple(mine.shape)} on this rank does not match config.json, "
                f"which asks for {tuple(parameter.value.shape)}"
            )
        parameter.value.copy_(mine)
