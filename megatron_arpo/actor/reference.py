"""The frozen reference policy of the KL term, held in host memory and swapped with the actor's weights where it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_arpo.actor.device import on_cuda


class ReferencePolicy:
    """A copy, taken at construction, of this rank's weights. It costs no device memory, and host memory for the weights once."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._host = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]
        if on_cuda():
            self._host = [tensor.pin_memory() for tensor in self._host]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the reference's weights inside, and its own again, bit for bit, behind it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, host in zip(self._parameters, self._host, strict=True):
            actor = parameter.detach().to("cpu", copy=True)
            parameter.copy_(host)
            host.copy_(actor)
