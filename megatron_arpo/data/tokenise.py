"""Demonstrations -> a cache of token sequences in the run folder, tokenised once and opened again when the run goes on.

Rows stream through: what is in memory is one chunk of them, however large the files are.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_arpo.data.chat import Part, encode_parts, split_demonstration
from megatron_arpo.data.dataset_info import DemonstrationFile
from megatron_arpo.data.demonstrations import Demonstration, read_demonstrations
from megatron_arpo.data.sequence_cache import CacheWriter, SequenceCache, read_description

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK_ROWS = 256
_SECONDS_BETWEEN_REPORTS = 15.0
_ENCODING = 1
"""Raised when the same rows become other ids, so that older caches are not taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokeniseSettings:
    """`all_turns` and `learn_results` as in chat.split_demonstration; longer sequences than `max_tokens` are dropped."""

    all_turns: bool
    learn_results: bool
    max_tokens: int


@dataclass(slots=True, kw_only=True)
class SequenceCounts:
    """rows = sequences + rows_too_long. tokens, loss_tokens and longest are those of the kept sequences."""

    rows: int = 0
    sequences: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    longest: int = 0
    rows_too_long: int = 0
    rows_repaired: int = 0


def tokenise(
    files: Sequence[DemonstrationFile],
    tokenizer: PreTrainedTokenizerBase,
    settings: TokeniseSettings,
    folder: Path,
    report: Callable[[str], None],
) -> tuple[SequenceCache, SequenceCounts]:
    """The cache in `folder`: the one there if files, tokenizer and settings are those it was made from, else a new one.

    `report` is told every 15 s how far it is. Raises ValueError for a bad row, naming it, where the disk is full, and where
    no sequence is left.
    """
    key = _fingerprint(files, tokenizer, settings)
    description = read_description(folder)
    if description is not None and description["key"] == key:
        return SequenceCache(folder), SequenceCounts(**description["counts"])
    if description is not None:
        report("demonstrations, tokenizer or settings are not those of the sequences in the run folder; tokenising again")
    counts = SequenceCounts()
    next_report = time.monotonic() + _SECONDS_BETWEEN_REPORTS
    with CacheWriter(folder) as writer:
        rows = read_demonstrations(files)
        while chunk := list(itertools.islice(rows, _CHUNK_ROWS)):
            encoded = encode_parts(tokenizer, [_split(tokenizer, one, settings) for one in chunk])
            kept = [one for one in encoded if len(one[0]) <= settings.max_tokens]
            writer.add(kept)
            counts.rows += len(chunk)
            counts.sequences += len(kept)
            counts.tokens += sum(len(ids) for ids, _ in kept)
            counts.loss_tokens += sum(sum(mask) for _, mask in kept)
            counts.longest = max(counts.longest, *(len(ids) for ids, _ in kept), 0)
            counts.rows_too_long += len(chunk) - len(kept)
            counts.rows_repaired += sum(one.was_repaired for one in chunk)
            if time.monotonic() > next_report:
                next_report = time.monotonic() + _SECONDS_BETWEEN_REPORTS
                report(f"{counts.rows} demonstrations tokenised, {counts.tokens} tokens")
        if not counts.sequences:
            raise ValueError(
                f"sft.demonstrations: all {counts.rows} are longer than {settings.max_tokens} tokens; raise sft.max_tokens and "
                f"actor.max_row_tokens"
            )
        writer.finish(key, asdict(counts))
    return SequenceCache(folder), counts


def _split(tokenizer: PreTrainedTokenizerBase, one: Demonstration, settings: TokeniseSettings) -> list[Part]:
    try:
        return split_demonstration(tokenizer, one.messages, all_turns=settings.all_turns, learn_results=settings.learn_results)
    except ValueError as error:
        raise ValueError(f"{one.place}: {error}") from error


def _fingerprint(files: Sequence[DemonstrationFile], tokenizer: PreTrainedTokenizerBase, settings: TokeniseSettings) -> str:
    """Changes with whatever decides the ids; of the files it takes path, size and time of change, so that none is read for it."""
    seen: list[Any] = [_ENCODING, asdict(settings), tokenizer.chat_template, tokenizer.eos_token]
    seen.append(hashlib.sha256(_vocabulary(tokenizer).encode()).hexdigest())
    for file in files:
        status = file.path.stat()
        seen.append([str(file.path.resolve()), status.st_size, status.st_mtime_ns, repr(file.fields)])
    return hashlib.sha256(json.dumps(seen, default=str).encode()).hexdigest()


def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """All that the tokenizer's own rules are made of."""
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.to_str()
    return json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
