"""An actor rank's side of a weight sync: says what it holds, and writes its fragments of a bucket into the transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from megatron_arpo.engine.buckets import Bucket, TensorPlace, buckets_of, checksum
from megatron_arpo.engine.transport.base import CudaIpcRoute, Outbox, Route
from megatron_arpo.engine.transport.open import open_outbox
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.families.pieces import Piece, pieces
from megatron_arpo.weights.fp8 import SCALE_SUFFIX, is_quantized, quantized_pieces, scale_region
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

    def held(self, fp8: bool) -> list[HeldPiece]:
        """With `fp8`, linear weights are FP8 blocks with their factors (weights/fp8.py)."""
        found = []
        for name in self._where:
            piece = self.piece(name)
            dtype = str(piece.blocks.dtype).removeprefix("torch.")
            if fp8 and is_quantized(name):
                dtype = "float8_e4m3fn"
                shape, region = scale_region(name, piece.shape, piece.region)
                found.append(HeldPiece(name=name + SCALE_SUFFIX, dtype="float32", shape=shape, region=region))
            found.append(HeldPiece(name=name, dtype=dtype, shape=piece.shape, region=piece.region))
        return found

    @torch.no_grad()
    def send(self, outbox: Outbox, bucket: Bucket, rank: int, with_checksums: bool) -> list[str]:
        """Sends what falls to actor rank `rank`; the checksums of those fragments in their order, none where not asked for."""
        found, quantized = [], {}
        for fragment in fragments_of(bucket, rank):
            place = bucket.places[fragment.tensor]
            piece = self._quantized(place, quantized) or self.piece(place.name)
            target = outbox.target(bucket, fragment)
            box = fragment.region.within(piece.region)
            piece.copy_to(target, box)
            if with_checksums:  # of the weights themselves where they lie in order, so that a wrong copy shows as well
                source = piece.view(box)
                found.append(checksum(target if source is None else source))
        outbox.send(bucket)
        return found

    def _quantized(self, place: TensorPlace, made: dict[str, tuple[Piece, Piece]]) -> Piece | None:
        """The FP8 weight or the factors that `place` asks for; `made` keeps both for the other of the two."""
        if place.dtype != "float8_e4m3fn" and not place.name.endswith(SCALE_SUFFIX):
            return None
        name = place.name.removesuffix(SCALE_SUFFIX)
        if name not in made:
            made[name] = quantized_pieces(name, self.piece(name))
        return made[name][place.name != name]

    def piece(self, name: str) -> Piece:
        """This rank's part of the Hugging Face tensor `name`, as it is now."""
        parameter, part = self._where[name]
        group = parameter.tensor_parallel_group
        return pieces(parameter.name, parameter.value.detach(), self._architecture, group.size(), group.rank())[part]


class SendsWeights:
    """What weights/sync.py calls on an actor rank, by name; mixed into the class of the rank."""

    def offer_weights(self, sender: WeightSender, rank: int, device: torch.device) -> None:
        """Once, before any of the others."""
        self.__sender, self.__rank, self.__device = sender, rank, device
        self.__outboxes: dict[str, tuple[Outbox, tuple[Bucket, ...]]] = {}

    def held_weights(self, fp8: bool) -> list[HeldPiece]:
        return self.__sender.held(fp8)

    def open_outbox(self, name: str, route: Route, buckets: list[dict[str, Any]]) -> str | None:
        """A way out for weights, in place of the one of that name. Returns what engines open a CUDA IPC route with."""
        self.close_outbox(name)
        made = buckets_of(buckets)
        outbox = open_outbox(route, made, self.__rank, self.__device)
        self.__outboxes[name] = (outbox, made)
        return outbox.handle if isinstance(route, CudaIpcRoute) else None

    def send_bucket(self, name: str, index: int, with_checksums: bool) -> list[str]:
        """Checksums of the fragments that this rank sends."""
        outbox, buckets = self.__outboxes[name]
        return self.__sender.send(outbox, buckets[index], self.__rank, with_checksums)

    def disconnect(self) -> None:
        """Closes every outbox."""
        for name in list(self.__outboxes):
            self.close_outbox(name)

    def close_outbox(self, name: str) -> None:
        if name in self.__outboxes:
            self.__outboxes.pop(name)[0].close()
