"""Datasets on disk -> Prompt records, and the resumable order in which training takes them.

Tokenizing is left to `chat.py`; dropping long prompts to the caller, who knows the tokenizer.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_arpo.data.jsonl import read_jsonl
from megatron_arpo.data.parquet import read_parquet
from megatron_arpo.data.system_prompt import SYSTEM_PROMPT
from megatron_arpo.types import Prompt

QUESTION_FIELDS = ("question", "problem")
"""Fields that may hold a bare question; the first that a row has is taken."""

_BROKEN_ESCAPES = {"\x08oxed": "\\boxed", "\x0crac{": "\\frac{"}
"""LaTeX commands whose backslash and first letter were once read as a backspace or a form feed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """A loaded dataset. `num_repaired` counts the rows in which a broken escape was repaired."""

    prompts: tuple[Prompt, ...]
    num_repaired: int


def load_prompts(path: str | Path, *, max_rows: int | None = None) -> PromptSet:
    r"""The prompts of `path`, or of its first `max_rows` rows. Row R, counted from 0, becomes prompt "STEM-R".

    - .parquet: the published columns `prompt` (a list of {role, content}), `reward_model.ground_truth` (text, a number
      or a list of them), and, optional, `data_source` and `extra_info`, which becomes the metadata.
    - .jsonl: the same fields nested, or {"question" or "problem", "answer"}, after the published system prompt; other
      fields become metadata. Of an answer that ends in GSM8K's "#### 18", the 18 is gold.

    "\boxed" and "\frac{" that an escape broke are repaired in every field and counted. A gold answer of blanks is kept:
    the published training set has one. Raises ValueError naming file, row or line, field and fix.
    """
    path = Path(path)
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows={max_rows} must be at least 1; leave it out to load all of {path}")
    if path.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"{path}: suffix {path.suffix!r} is unknown; give a .parquet or a .jsonl file")
    if not path.is_file():
        raise ValueError(f"{path}: is not a file; check the path")
    prompts: list[Prompt] = []
    num_repaired = 0
    rows = read_parquet(path, required=("prompt", "reward_model")) if path.suffix == ".parquet" else read_jsonl(path)
    for place, row in itertools.islice(rows, max_rows):
        repaired = repair_escapes(row)
        num_repaired += repaired != row
        prompts.append(_parse_row(repaired, f"{path.stem}-{len(prompts)}", path.stem, place))
    if not prompts:
        raise ValueError(f"{path}: holds no rows; give a dataset with at least one prompt")
    return PromptSet(prompts=tuple(prompts), num_repaired=num_repaired)


def repair_escapes(value: Any) -> Any:
    r"""`value` with the broken escapes in all of its strings repaired, at any depth.

    Example: repair_escapes({"content": ["\x08oxed{5}"]}) == {"content": [r"\boxed{5}"]}
    """
    if isinstance(value, str):
        for broken, meant in _BROKEN_ESCAPES.items():
            value = value.replace(broken, meant)
        return value
    if isinstance(value, dict):
        return {name: repair_escapes(held) for name, held in value.items()}
    if isinstance(value, list):
        return [repair_escapes(held) for held in value]
    return value


def _parse_row(row: Mapping[str, Any], prompt_id: str, stem: str, place: str) -> Prompt:
    if "prompt" in row:
        return _parse_published(row, prompt_id, stem, place)
    field = next((name for name in QUESTION_FIELDS if name in row), None)
    if field is None:
        raise ValueError(f"{place}: has neither 'prompt' nor 'question' nor 'problem'; add one of them")
    question = row[field]
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{place}: field {field!r} is {question!r}; write the question as text")
    return Prompt(
        prompt_id=prompt_id,
        messages=({"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}),
        answer=_parse_answer(row.get("answer"), "answer", place),
        source=stem,
        metadata={name: held for name, held in row.items() if name not in (*QUESTION_FIELDS, "answer")},
    )


def _parse_published(row: Mapping[str, Any], prompt_id: str, stem: str, place: str) -> Prompt:
    messages = row["prompt"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError(f"{place}: field 'prompt' is {_shown(messages)}; write a list of {{role, content}}, both text")
    graded = row.get("reward_model")
    extra = row.get("extra_info")
    if not isinstance(graded, dict):
        raise ValueError(f"{place}: field 'reward_model' is {_shown(graded)}; write {{'ground_truth': ...}}")
    return Prompt(
        prompt_id=prompt_id,
        messages=tuple({"role": message["role"], "content": message["content"]} for message in messages),
        answer=_parse_answer(graded.get("ground_truth"), "reward_model.ground_truth", place),
        source=str(row.get("data_source") or stem),
        metadata=extra if isinstance(extra, dict) else {},
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))


def _parse_answer(answer: Any, field: str, place: str) -> tuple[str, ...]:
    golds = answer if isinstance(answer, list) else [answer]
    found = tuple(_gold_text(gold) for gold in golds)
    if not found or None in found:
        raise ValueError(f"{place}: field {field!r} is {_shown(answer)}; write text, a number or a list of such")
    return found


def _gold_text(gold: Any) -> str | None:
    """The text of one gold answer; None where there is none. Worked solutions of GSM8K end in "#### 18": 18."""
    if isinstance(gold, str):
        worked = re.search(r"(?:^|\n)#### *([^\n]+)\s*\Z", gold)
        return worked.group(1).strip() if worked else gold or None
    is_number = isinstance(gold, int | float) and not isinstance(gold, bool) and math.isfinite(gold)
    return str(gold) if is_number else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class PromptCursor:
    """Deals out prompt indices, every epoch in a new order that (seed, epoch) alone decides.

    `position` is all there is to keep: a cursor made with it goes on where this one stands.

    Example: PromptCursor(3, seed=0).take(4) is a permutation of 0, 1, 2 and the first index of the next epoch's.
    """

    def __init__(self, num_prompts: int, seed: int, epoch: int = 0, offset: int = 0) -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts={num_prompts} must be at least 1; give a dataset with prompts")
        if epoch < 0:
            raise ValueError(f"epoch={epoch} must be at least 0")
        if not 0 <= offset < num_prompts:
            raise ValueError(
                f"offset={offset} must be at least 0 and below num_prompts={num_prompts}; "
                "resume with the dataset that the position was saved with"
            )
        self.num_prompts = num_prompts
        self.seed = seed
        self._epoch = epoch
        self._offset = offset
        self._order = self._order_of(epoch)

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, offset) of the next index; offset is below `num_prompts`."""
        return self._epoch, self._offset

    def take(self, num_indices: int) -> list[int]:
        """The next `num_indices` indices; goes on into the next epochs where this one ends."""
        if num_indices < 0:
            raise ValueError(f"num_indices={num_indices} must be at least 0")
        taken: list[int] = []
        while len(taken) < num_indices:
            part = self._order[self._offset : self._offset + num_indices - len(taken)]
            taken += part
            self._offset += len(part)
            if self._offset == self.num_prompts:
                self._epoch, self._offset = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
        return taken

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(self.num_prompts))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order
