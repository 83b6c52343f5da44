"""Scores the rows of a jsonl file with a reward, without any model: what `megatron-arpo score` runs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_arpo.reward.base import get_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSummary:
    """What a scored file holds. Example: ScoreSummary(num_rows=180, mean=0.41)."""

    num_rows: int
    mean: float


def score_file(reward_name: str, source: str | Path, target: str | Path) -> ScoreSummary:
    """Writes the rows of `source` to `target` with `score` and `reason`; {"solution": str, "answer": str or [str]}.

    Fields of these two names are replaced, others are kept; blank lines are no rows. `target` is written aside and then
    renamed: it appears whole or not at all, and may be `source`. Raises ValueError for an unknown reward, files that
    cannot be read or written, and rows that lack something, naming file, line and field.
    """
    reward = get_reward(reward_name)
    source, target = Path(source), Path(target)
    if target.is_dir() or not target.parent.is_dir():
        raise ValueError(f"{target}: cannot be written; name a file in a folder that exists")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    scores = []
    try:
        # In a JSON string, a lone surrogate is spelled just as backslashreplace spells it.
        with partial.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            for row in _read_rows(source):
                result = reward(row["solution"], row["answer"])
                scores.append(result.score)
                scored = {**row, "score": result.score, "reason": result.reason}
                file.write(json.dumps(scored, ensure_ascii=False) + "\n")
        if not scores:
            raise ValueError(f'{source}: holds no rows; write one {{"solution": ..., "answer": ...}} a line')
        partial.replace(target)
    except OSError as error:
        raise ValueError(f"{target}: cannot be written ({error.strerror}); name a folder you may write to") from error
    finally:
        partial.unlink(missing_ok=True)
    return ScoreSummary(num_rows=len(scores), mean=math.fsum(scores) / len(scores))


def _read_rows(source: Path) -> Iterator[dict]:
    try:
        file = source.open("rb")
    except OSError as error:
        raise ValueError(f"{source}: cannot be read ({error.strerror}); name a jsonl file of solutions") from error
    with file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parse_row(line, f"{source}, line {number}")


def _parse_row(line: bytes, place: str) -> dict:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: is not JSON in UTF-8 ({error}); write one object a line") from error
    if not isinstance(row, dict):
        raise ValueError(f'{place}: is a {type(row).__name__}; write an object {{"solution": ..., "answer": ...}}')
    for name in ("solution", "answer"):
        if name not in row:
            raise ValueError(f"{place}: field {name!r} is missing; add it (there are: {', '.join(map(repr, row))})")
    if not isinstance(row["solution"], str):
        raise ValueError(f"{place}: field 'solution' is {row['solution']!r}; write it as a string")
    golds = [row["answer"]] if isinstance(row["answer"], str) else row["answer"]
    if not isinstance(golds, list) or not golds or not all(isinstance(gold, str) for gold in golds):
        raise ValueError(f"{place}: field 'answer' is {row['answer']!r}; write one string or a list of strings")
    return row
