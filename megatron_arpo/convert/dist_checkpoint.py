"""Keys and chunks of a Megatron dist-checkpoint (torch_dist), as whole parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_arpo.convert.saved_files import SavedTensor
from megatron_arpo.families.architecture import Architecture
from megatron_arpo.families.parameters import Parameter, all_parameters
from megatron_arpo.weights.lazy_tensor import LazyTensor, Tile, TiledTensor

METADATA_FILE = ".metadata"
LAYERS = "decoder.layers."
_EXPERTS = "mlp.experts."
_MODEL = ("decoder.", "embedding.", "output_layer.")
_KEYS = {
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
}
"""Names of the norms, fused into the next layer first: Transformer Engine's, to which Megatron maps its own. Behind it those of
layers that are not fused."""


def key_name(name: str, has_experts: bool) -> str:
    """The name in a checkpoint, behind its layer prefix, of a parameter of every layer."""
    if name.startswith(_EXPERTS):
        return f"{_EXPERTS}experts.{name.removeprefix(_EXPERTS)}"
    if name == "pre_mlp_layernorm.weight" and has_experts:
        return name  # nothing that Transformer Engine could fuse it into
    return _KEYS.get(name, (name,))[0]


def read_parameters(folder: Path, architecture: Architecture) -> dict[Parameter, LazyTensor]:
    """What `folder`, with .metadata and .distcp files, has of the model, the vocabulary with its padding. Raises ValueError where
    metadata or files are damaged, or hold tensors of a model that the architecture has not."""
    metadata = read_metadata(folder)
    entries = {key: entry for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
    parts: dict[str, dict[tuple[int, ...], list[Tile]]] = {}
    found: dict[Parameter, LazyTensor] = {}
    for parameter in [*all_parameters(architecture), Parameter("output_layer.weight", None, None)]:
        for key, lead, counts in _places(parameter, architecture):
            if key in entries:
                if tuple(entries[key].size[: len(lead)]) != counts:
                    raise ValueError(
                        f"{folder}: {key} is of {' x '.join(map(str, entries[key].size[: len(lead)]))} layers (and experts), config.json "
                        f"has {' x '.join(map(str, counts))}; use the config.json that belongs to this checkpoint"
                    )
                if key not in parts:
                    parts[key] = _tiles(folder, metadata.storage_data, key, entries[key], len(lead))
                found[parameter] = _whole(folder, f"{key} {list(lead)}", entries[key], len(lead), parts[key].get(lead, []))
                break
    if found and (extra := [key for key in entries if key.startswith(_MODEL) and key not in parts]):
        raise ValueError(
            f"{folder}: {extra[0]} is not part of a {architecture.family} model with this config.json; "
            f"use the config.json that belongs to the weights"
        )
    return found


def read_metadata(folder: Path) -> Any:
    """torch's Metadata. Raises ValueError where it is damaged or files it names are missing or too short."""
    path = folder / METADATA_FILE
    try:
        metadata = FileSystemReader(str(folder)).read_metadata()
    except Exception as error:  # whatever a damaged pickle raises
        raise ValueError(f"{path}: cannot be read ({error!r}); it is damaged, copy the checkpoint again") from error
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        file = folder / name
        if not file.exists():
            raise ValueError(f"{file} is missing; copy the checkpoint again")
        if file.stat().st_size < end:
            raise ValueError(f"{file}: has {file.stat().st_size} of {end} bytes; the file is truncated, copy it again")
    return metadata


def _places(parameter: Parameter, architecture: Architecture) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(key, indices of its leading dimensions, their sizes) under which a parameter may be kept: layers stacked, or each by itself."""
    if parameter.layer is None:
        return [(parameter.name, (), ())]
    names = [key_name(parameter.name, has_experts=False), *_KEYS.get(parameter.name, ())]
    expert, experts = ((), ()) if parameter.expert is None else ((parameter.expert,), (architecture.experts.num_experts,))
    return [
        place
        for name in dict.fromkeys(names)
        for place in (
            (LAYERS + name, (parameter.layer, *expert), (architecture.num_layers, *experts)),
            (f"{LAYERS}{parameter.layer}.{name}", expert, experts),
        )
    ]


def _tiles(
    folder: Path, storage: Mapping[MetadataIndex, Any], key: str, entry: TensorStorageMetadata, depth: int
) -> dict[tuple[int, ...], list[Tile]]:
    """The chunks of a key, by the indices of its `depth` leading dimensions."""
    found: dict[tuple[int, ...], list[Tile]] = {}
    for chunk in entry.chunks:
        if any(size != 1 for size in chunk.sizes[:depth]):
            raise ValueError(f"{folder}: {key} has chunks of several layers, which is not how Megatron writes them")
        place = storage[MetadataIndex(key, chunk.offsets)]
        part = SavedTensor(folder / place.relative_path, place.offset, place.length, entry.properties.dtype, tuple(chunk.sizes[depth:]))
        row, column = [*chunk.offsets[depth:], 0][:2]
        found.setdefault(tuple(chunk.offsets[:depth]), []).append(Tile(part, row, column))
    return found


def _whole(folder: Path, what: str, entry: TensorStorageMetadata, depth: int, tiles: Sequence[Tile]) -> LazyTensor:
    shape = tuple(entry.size[depth:])
    if len(tiles) == 1 and tiles[0].tensor.shape == shape:
        return tiles[0].tensor
    try:
        return TiledTensor(entry.properties.dtype, shape, tiles)
    except ValueError as error:
        raise ValueError(f"{folder}: {what} is not whole ({error}); copy the checkpoint again") from error
