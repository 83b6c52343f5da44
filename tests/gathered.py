"""Whole Hugging Face tensors, put together from a Megatron model's ranks: what the tests compare. Training never does this."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from megatron_arpo.families.architecture import Architecture
from megatron_arpo.families.names import split_dim, to_hf
from megatron_arpo.weights.megatron import NamedParameter, named_parameters


@dataclass(frozen=True, slots=True)
class GatheredTensor:
    """A whole Hugging Face tensor; `written_here` on exactly one of the ranks that have it."""

    name: str
    tensor: torch.Tensor
    written_here: bool


@torch.no_grad()
def gather_hf_weights(
    chunks: Sequence[GPTModel],
    architecture: Architecture,
    value_of: Callable[[torch.nn.Parameter], torch.Tensor] = lambda parameter: parameter,
) -> Iterator[GatheredTensor]:
    """Whole Hugging Face tensors of this rank's stage and experts, one Megatron parameter at a time. A collective over the
    tensor-parallel ranks: all must run it to the end. Tied output weights are left out. `value_of` picks what is gathered in
    place of the weights, its gradient for one."""
    for parameter in named_parameters(chunks, architecture):
        if parameter.name == "output_layer.weight" and architecture.tied_embeddings:
            continue
        mine, group = value_of(parameter.value).detach(), parameter.tensor_parallel_group
        shards = [mine]
        if group.size() > 1 and split_dim(parameter.name) is not None:
            shards = [torch.empty_like(mine) for _ in range(group.size())]
            torch.distributed.all_gather(shards, mine.contiguous(), group=group)
        whole = _unshard(parameter.name, shards)
        for name, tensor in to_hf(parameter.name, parameter.hf_names, whole, architecture).items():
            yield GatheredTensor(name, tensor, _is_first_copy(parameter))


def _is_first_copy(parameter: NamedParameter) -> bool:
    """True on one of the ranks that hold this parameter or a slice of it."""
    if parameter.expert is not None:
        return parallel_state.get_expert_tensor_parallel_rank() == 0 and parallel_state.get_expert_data_parallel_rank() == 0
    copies = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return parallel_state.get_tensor_model_parallel_rank() == 0 and copies == 0


def _unshard(megatron_name: str, shards: list[torch.Tensor]) -> torch.Tensor:
    """Inverse of families.names.shard, over all tensor-parallel ranks in order."""
    if len(shards) == 1 or split_dim(megatron_name) is None:
        return shards[0]
    if "linear_fc1" in megatron_name:
        halves = [tensor.chunk(2) for tensor in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(shards, split_dim(megatron_name))
