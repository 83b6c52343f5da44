"""An actor rank's side of a weight sync: says what it holds, and writes its fragments of a bucket into the transport."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.models.gpt import GPTModel

from megatron_arpo.engine.buckets import Bucket, checksum
from megatron_arpo.engine.transport.base import Outbox
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.families.pieces import Piece, pieces
from megatron_arpo.weights.megatron import NamedParameter, named_parameters
from megatron_arpo.weights.plan import HeldPiece, fragments_of


class WeightSender:
    """Over the model chunks of this rank. Nothing is gathered: a rank sends parts of its own shards."""

    def __init__(self, chunks: Sequence[GPTModel], architecture: Architecture) -> None:
        self._architecture = architecture
        self._where: dict[str, tuple[NamedParameter, int]] = {}
        for parameter in named_parameters(chunks, architecture):
            if parameter.name == "output_layer.weight" and architecture.tied_embeddings:
                continue
            for part, name in enumerate(parameter.hf_names):
                self._where[name] = (parameter, part)

    def held(self) -> list[HeldPiece]:
        found = []
        for name in self._where:
            piece = self.piece(name)
            dtype = str(piece.blocks.dtype).removeprefix("torch.")
            found.append(HeldPiece(name=name, dtype=dtype, shape=piece.shape, region=piece.region))
        return found

    @torch.no_grad()
    def send(self, outbox: Outbox, bucket: Bucket, rank: int, with_checksums: bool) -> list[str]:
        """Sends what falls to actor rank `rank`; the checksums of those fragments in their order, none where not asked for."""
        found = []
        for fragment in fragments_of(bucket, rank):
            piece = self.piece(bucket.places[fragment.tensor].name)
            target = outbox.target(bucket, fragment)
            piece.copy_to(target, fragment.region.within(piece.region))
            if with_checksums:
                found.append(checksum(target))
        outbox.send(bucket)
        return found

    def piece(self, name: str) -> Piece:
        """This rank's part of the Hugging Face tensor `name`, as it is now."""
        parameter, part = self._where[name]
        group = parameter.tensor_parallel_group
        return pieces(parameter.name, parameter.value.detach(), self._architecture, group.size(), group.rank())[part]
