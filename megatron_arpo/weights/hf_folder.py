"""Writing a Hugging Face folder that transformers and vLLM load as it is, tensor by tensor, block by block."""

from __future__ import annotations

import collections
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_arpo.weights.aside import written_aside
from megatron_arpo.weights.block_copy import Placement, write_tensors
from megatron_arpo.weights.lazy_tensor import LazyTensor, num_bytes
from megatron_arpo.weights.safetensors_folder import INDEX_FILE, SAFETENSORS_DTYPES, SINGLE_FILE

_HF_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
    "special_tokens_map.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "added_tokens.json",
)  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
DEFAULT_SHARD_GIB = 5.0


def write_hf_folder(
    target: Path,
    tensors: Mapping[str, LazyTensor],
    config_from: Path,
    *,
    max_shard_bytes: int = int(DEFAULT_SHARD_GIB * (1 << 30)),
    workers: int = 1,
) -> None:
    """Weights in files of at most `max_shard_bytes` (a larger tensor has its own), config and tokenizer those of the folder
    `config_from`, config.json with the tensors' dtype. Written aside and renamed, replacing `target`. Raises ValueError where
    there is no room."""
    shards = _sharded(tensors, max_shard_bytes)
    total = sum(map(num_bytes, tensors.values()))
    with written_aside(target, total) as aside:
        copy_hf_files(config_from, aside)
        set_dtype(aside / "config.json", tensors)
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        if len(shards) == 1:
            names = [SINGLE_FILE]
        else:
            weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (aside / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        write_tensors([one for name, shard in zip(names, shards, strict=True) for one in _write_header(aside / name, shard)], workers)


def copy_hf_files(source: Path, target: Path) -> None:
    """Config and tokenizer of a Hugging Face folder, so that the target needs no other folder to be used."""
    for name in _HF_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def _sharded(tensors: Mapping[str, LazyTensor], max_shard_bytes: int) -> Sequence[Mapping[str, LazyTensor]]:
    shards: list[dict[str, LazyTensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + num_bytes(tensor) > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += num_bytes(tensor)
    return shards


def _write_header(path: Path, tensors: Mapping[str, LazyTensor]) -> list[Placement]:
    """Makes the file with its header and full length; what is left to be written. Larger elements first, so that each tensor
    lies on a multiple of its element's size, as its readers want it."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ordered:
        end = offset + num_bytes(tensor)
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return [Placement(path, 8 + len(text) + header[name]["data_offsets"][0], tensor) for name, tensor in ordered]


def set_dtype(config_path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """The dtype of most of the weights, under the name that the file uses; older readers know `torch_dtype` alone."""
    values = json.loads(config_path.read_text(encoding="utf-8"))
    sizes: collections.Counter = collections.Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += num_bytes(tensor)
    name = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if key in values] or ["torch_dtype"]
    if any(values.get(key) != name for key in keys):
        config_path.write_text(json.dumps(values | dict.fromkeys(keys, name), indent=2) + "\n", encoding="utf-8")
