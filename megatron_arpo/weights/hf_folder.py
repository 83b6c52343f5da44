"""Writing a Hugging Face folder that transformers and vLLM load as it is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

_HF_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
             "special_tokens_map.json", "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json")  # fmt: skip


def write_hf_folder(target: Path, tensors: Mapping[str, torch.Tensor], copy_files: Callable[[Path], None]) -> None:
    """Tensors as model.safetensors beside what `copy_files` puts there; written aside and renamed, replacing `target`.
    Raises OSError where there is no room."""
    from safetensors.torch import save_file

    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        copy_files(aside)
        save_file(dict(tensors), aside / "model.safetensors", metadata={"format": "pt"})
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(target, ignore_errors=True)
    os.rename(aside, target)


def copy_hf_files(source: Path, target: Path) -> None:
    """Config and tokenizer of a Hugging Face folder, so that the target needs no other folder to be used."""
    for name in _HF_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
