"""Datasets of a run: loaded, checked, and without the prompts that are too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_arpo.config.run import RunConfig
from megatron_arpo.data.chat import encode_prompt
from megatron_arpo.data.prompts import PromptSet, load_prompts
from megatron_arpo.observe.progress import say
from megatron_arpo.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasets:
    train: tuple[Prompt, ...]
    valid: tuple[Prompt, ...]


def read_datasets(config: RunConfig, need_train: bool) -> dict[str, PromptSet]:
    """Reads the files; fast, before anything starts. Raises ValueError naming file, field and fix."""
    if need_train and config.data.train is None:
        raise ValueError("data.train is missing; give a parquet or jsonl file of prompts")
    files = {"train": config.data.train if need_train else None, "valid": config.data.valid}
    found = {name: load_prompts(path) for name, path in files.items() if path is not None}
    for name, prompts in found.items():
        repaired = f", broken escapes repaired in {prompts.num_repaired}" if prompts.num_repaired else ""
        say(f"{name}: {len(prompts.prompts)} prompts from {files[name]}{repaired}")
    return found


def drop_long(found: dict[str, PromptSet], config: RunConfig) -> Datasets:
    """Leaves out prompts of more than data.max_prompt_tokens tokens and says how many. Raises ValueError where none is left."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    kept = {name: _fitting(prompts.prompts, tokenizer, config.data.max_prompt_tokens, name) for name, prompts in found.items()}
    return Datasets(train=kept.get("train", ()), valid=kept.get("valid", ())[: config.eval.num_prompts])


def _fitting(prompts: Sequence[Prompt], tokenizer: object, max_tokens: int, name: str) -> tuple[Prompt, ...]:
    lengths = [len(encode_prompt(tokenizer, prompt.messages)) for prompt in prompts]
    kept = tuple(prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= max_tokens)
    if len(kept) < len(prompts):
        say(f"{name}: {len(prompts) - len(kept)} prompts dropped, longer than data.max_prompt_tokens={max_tokens}")
    if not kept:
        raise ValueError(
            f"data.{name}: all {len(prompts)} prompts are longer than data.max_prompt_tokens={max_tokens} "
            f"(shortest {min(lengths)}); raise data.max_prompt_tokens"
        )
    return kept
