"""Knows a checkpoint's kind by what lies in its folder, and opens it."""

from __future__ import annotations

from pathlib import Path

from megatron_arpo.convert.dist_checkpoint import METADATA_FILE, read_parameters
from megatron_arpo.convert.source import TensorSource, of_megatron_parameters
from megatron_arpo.convert.verl_fsdp import is_fsdp_folder, read_fsdp
from megatron_arpo.convert.verl_megatron import RANK_FILES, read_ranks
from megatron_arpo.families.architecture import Architecture, read_architecture
from megatron_arpo.weights.safetensors_folder import INDEX_FILE, SINGLE_FILE, stored_tensors

_VERL_CONFIG_FOLDERS = ("huggingface", "hf_config_and_tokenizer", "../huggingface", "../hf_config_and_tokenizer", ".")
"""Where verl's versions have put config.json, seen from the folder with the weights."""
_KINDS = (
    "a Hugging Face folder with safetensors; a run folder or one of its checkpoints; a folder that `convert to-megatron` wrote; a "
    "torch_dist folder with --hf-config; verl's actor folder, FSDP or Megatron"
)


def open_source(folder: Path, hf_config: Path | None = None) -> TensorSource:
    """A checkpoint of any kind; `hf_config` is the folder whose config.json and tokenizer are used in place of its own. Reads
    headers and metadata, no tensor. Raises ValueError where the folder is of no known kind, damaged, or of no supported model."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give {_KINDS}")
    if (folder / "checkpoints").is_dir():
        folder = _newest_checkpoint(folder)
    if (folder / "weights" / METADATA_FILE).exists():
        return _megatron(folder / "weights", hf_config or folder / "hf")
    if (folder / METADATA_FILE).exists():
        if hf_config is None:
            raise ValueError(f"{folder}: a bare torch_dist folder does not say of which model it is; add --hf-config FOLDER")
        return _megatron(folder, hf_config)
    if (found := _open_verl(folder, hf_config) or _open_verl(folder / "actor", hf_config)) is not None:
        return found
    if (folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists():
        return _hugging_face(folder, hf_config)
    raise ValueError(f"{folder}: not a checkpoint; give {_KINDS}")


def _open_verl(folder: Path, hf_config: Path | None) -> TensorSource | None:
    if is_fsdp_folder(folder):
        hf_folder = hf_config or _verl_config(folder)
        architecture = _architecture(hf_folder)
        return TensorSource(
            kind="verl FSDP checkpoint", folder=folder, hf_folder=hf_folder, architecture=architecture, tensors=read_fsdp(folder)
        )
    for ranks in (folder / "model", folder):
        if next(ranks.glob(RANK_FILES), None) is not None:
            hf_folder = hf_config or _verl_config(ranks)
            architecture = _architecture(hf_folder)
            tensors = of_megatron_parameters(read_ranks(ranks), architecture, folder)
            return TensorSource(
                kind="verl Megatron checkpoint", folder=folder, hf_folder=hf_folder, architecture=architecture, tensors=tensors
            )
    if (folder / "dist_ckpt" / METADATA_FILE).exists():
        source = _megatron(folder / "dist_ckpt", hf_config or _verl_config(folder))
        # with a bridge, verl keeps the optimizer alone there and writes the model as a Hugging Face folder beside it
        return source if source.tensors else _hugging_face(folder / "huggingface", hf_config)
    return None


def _architecture(hf_folder: Path) -> Architecture:
    if not (hf_folder / "config.json").is_file():
        raise ValueError(f"{hf_folder}: has no config.json; name the folder of the model's config.json with --hf-config")
    return read_architecture(hf_folder)


def _newest_checkpoint(run: Path) -> Path:
    found = sorted(path.parent for path in (run / "checkpoints").glob("step_*/state.json"))
    if not found:
        raise ValueError(f"{run}: the run has no finished checkpoint yet")
    return found[-1]


def _hugging_face(folder: Path, hf_config: Path | None) -> TensorSource:
    hf_folder = hf_config or folder
    architecture = _architecture(hf_folder)
    return TensorSource(
        kind="Hugging Face folder", folder=folder, hf_folder=hf_folder, architecture=architecture, tensors=stored_tensors(folder)
    )


def _megatron(folder: Path, hf_folder: Path) -> TensorSource:
    architecture = _architecture(hf_folder)
    tensors = of_megatron_parameters(read_parameters(folder, architecture), architecture, folder)
    return TensorSource(kind="Megatron dist-checkpoint", folder=folder, hf_folder=hf_folder, architecture=architecture, tensors=tensors)


def _verl_config(folder: Path) -> Path:
    for name in _VERL_CONFIG_FOLDERS:
        if (folder / name / "config.json").exists():
            return (folder / name).resolve() if name.startswith("..") else folder / name
    raise ValueError(f"{folder}: has no config.json, nor has its huggingface/; add --hf-config FOLDER")
