"""A checkpoint of any kind, seen as whole Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_arpo.convert.compare import largest_difference
from megatron_arpo.convert.fuse import megatron_shape, split
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.families.parameters import Parameter, all_parameters, hf_shapes
from megatron_arpo.weights.lazy_tensor import CastTensor, LazyTensor

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_NOT_WEIGHTS = "rotary_emb.inv_freq"
"""Buffers that old versions of transformers saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """Example: TensorSource(kind="Hugging Face folder", folder=Path("Qwen3-4B"), hf_folder=Path("Qwen3-4B"), ...). `tensors` are all
    that were found, by Hugging Face name; `complete` has what the model needs. `hf_folder` has config.json and the tokenizer."""

    kind: str
    folder: Path
    hf_folder: Path
    architecture: Architecture
    tensors: Mapping[str, LazyTensor]


def of_megatron_parameters(found: Mapping[Parameter, LazyTensor], architecture: Architecture, folder: Path) -> dict[str, LazyTensor]:
    """Hugging Face tensors by name, of whole Megatron tensors. Raises ValueError where one has not its shape."""
    tensors: dict[str, LazyTensor] = {}
    for parameter, whole in found.items():
        expected = megatron_shape(parameter, architecture)
        is_vocabulary = parameter.hf_names[0] in (EMBEDDING, OUTPUT)
        if whole.shape[1:] != expected[1:] or (whole.shape[0] < expected[0] if is_vocabulary else whole.shape[0] != expected[0]):
            raise ValueError(
                f"{folder}: {' + '.join(parameter.hf_names)} should make a tensor of shape {expected} by config.json, "
                f"found {whole.shape}; use the config.json that belongs to this checkpoint"
            )
        tensors |= split(parameter, whole, architecture)
    return tensors


def expected_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Of every Hugging Face tensor of the model, in order of depth."""
    return {
        name: shape
        for parameter in all_parameters(architecture)
        for name, shape in zip(parameter.hf_names, hf_shapes(parameter.name, architecture), strict=True)
    }


def complete(source: TensorSource, dtype: torch.dtype | None = None) -> dict[str, LazyTensor]:
    """The tensors of the model in order of depth, cast to `dtype` where one is given. Raises ValueError where one is missing, is of
    no such model, has another shape, or where tied output weights differ from the embedding."""
    expected, found = expected_shapes(source.architecture), source.tensors
    if missing := [name for name in expected if name not in found]:
        raise ValueError(f"{source.folder}: tensor {_first(missing)} is missing; the checkpoint is not whole or not of this config.json")
    extra = [name for name in found if name not in expected and not name.endswith(_NOT_WEIGHTS)]
    if source.architecture.tied_embeddings and OUTPUT in extra:
        _check_tied(source)
        extra.remove(OUTPUT)
    if extra:
        raise ValueError(
            f"{source.folder}: tensor {_first(extra)} is not part of a {source.architecture.family} model with this config.json; "
            f"use the config.json that belongs to the weights"
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise ValueError(
                f"{source.folder}: tensor {name} has shape {found[name].shape}, config.json asks for {shape}; "
                f"use the config.json that belongs to the weights"
            )
    return {name: found[name] if dtype in (None, found[name].dtype) else CastTensor(found[name], dtype) for name in expected}


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _check_tied(source: TensorSource) -> None:
    difference = largest_difference(source.tensors[EMBEDDING], source.tensors[OUTPUT])
    if difference is not None:
        raise ValueError(
            f"{source.folder}: config.json ties the output weights to the embedding, but {OUTPUT} differs from {EMBEDDING} by up to "
            f"{difference:.3g}; set tie_word_embeddings to false in config.json"
        )
