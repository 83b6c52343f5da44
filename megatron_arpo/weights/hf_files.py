"""A Hugging Face folder without its tensors: config and tokenizer, and whether two have the same weights. Needs no torch."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

_HF_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
    "special_tokens_map.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "added_tokens.json",
)  # fmt: skip
_FINGERPRINT_BYTES = 1 << 20


def copy_hf_files(source: Path, target: Path) -> None:
    """Config and tokenizer of a Hugging Face folder, so that the target needs no other folder to be used."""
    for name in _HF_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def fingerprint(folder: Path) -> str:
    """Of a Hugging Face folder's weights: sizes, heads and both ends of every file, so that a model is known again in no time."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        found.update(size.to_bytes(8, "little"))
        with open(path, "rb") as file:
            found.update(file.read(_FINGERPRINT_BYTES))
            file.seek(max(0, size - _FINGERPRINT_BYTES))
            found.update(file.read())
    return found.hexdigest()
