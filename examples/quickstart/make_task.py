"""Writes the quickstart's task: a tiny random model, prompts to train on and to hold out, and demonstrations.

    python examples/quickstart/make_task.py --out DIR --seed 0

DIR gets model/ (Hugging Face folder), train.parquet and valid.parquet (the published dataset format),
demonstrations.jsonl (ShareGPT) and task.json (the settings). The same settings give the same bytes. The problems come
from `word_problems.py`, the model from `tiny_model.py`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from word_problems import Demonstration, Problem, demonstrate, draw_distinct_problems, draw_problem, random_stream

TASK_VERSION = 1
"""Part of task.json; raise it when the same settings write something else, so that no old folder is reused."""

DATA_SOURCE = "quickstart_word_problems"
NUM_TOKENIZER_TEXTS = 2000

PROMPT_SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"content": pa.string(), "role": pa.string()})),
        "ability": pa.string(),
        "reward_model": pa.struct({"ground_truth": pa.string(), "style": pa.string()}),
        "extra_info": pa.struct({"index": pa.int64(), "need_tools_kwargs": pa.bool_(), "question": pa.string(), "split": pa.string()}),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """What the files depend on. The defaults are those whose learning curve the example's README shows."""

    seed: int = 0
    num_demonstrations: int = 12800
    num_train: int = 4096
    num_valid: int = 256

    def __post_init__(self) -> None:
        for name in ("num_demonstrations", "num_train", "num_valid"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')}={getattr(self, name)} must be at least 1")

    def as_json(self) -> str:
        return json.dumps({"task_version": TASK_VERSION, **asdict(self)}, indent=2) + "\n"


def make_task(out: Path, settings: TaskSettings) -> bool:
    """Writes the task to `out`; False if it was there already. Raises ValueError where `out` holds anything else.

    The files are written beside `out` and renamed at the end: `out` is there in full or not at all.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        _check_same_task(out, settings)
        return False
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # a killed run's
    partial.mkdir(parents=True)
    try:
        _write_task(partial, settings)
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def _check_same_task(out: Path, settings: TaskSettings) -> None:
    try:
        found = (out / "task.json").read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--out={out} exists and is no quickstart task (no task.json); give a new folder") from error
    if found != settings.as_json():
        raise ValueError(
            f"--out={out} holds a task with other settings, {' '.join(found.split())}; give another folder, or delete this one"
        )


def _write_task(folder: Path, settings: TaskSettings) -> None:
    from tiny_model import write_model  # seconds of imports that a reused task does not need

    taken: set[str] = set()
    for split, num_problems in (("valid", settings.num_valid), ("train", settings.num_train)):
        problems = draw_distinct_problems(random_stream(settings.seed, split), num_problems, taken)
        pq.write_table(prompt_table(problems, split), folder / f"{split}.parquet")

    rng = random_stream(settings.seed, "demonstrations")
    problems = draw_distinct_problems(rng, settings.num_demonstrations, taken)
    write_demonstrations(folder / "demonstrations.jsonl", [demonstrate(rng, problem) for problem in problems])

    write_model(folder / "model", tokenizer_texts(), settings.seed)
    (folder / "task.json").write_text(settings.as_json(), encoding="utf-8")


def prompt_table(problems: Sequence[Problem], split: str) -> pa.Table:
    """One row a problem. No system prompt: a model this small would only spend its context on it."""
    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": problem.question}],
            "ability": "math",
            "reward_model": {"ground_truth": problem.answer, "style": "rule"},
            "extra_info": {"index": index, "need_tools_kwargs": True, "question": problem.question, "split": split},
        }
        for index, problem in enumerate(problems)
    ]
    return pa.Table.from_pylist(rows, schema=PROMPT_SCHEMA)


def write_demonstrations(path: Path, demonstrations: Sequence[Demonstration]) -> None:
    """ShareGPT, one conversation a line. What is flawed is not marked: the learner is not to know."""
    with path.open("w", encoding="utf-8") as file:
        for demonstration in demonstrations:
            turns = (("human", demonstration.problem.question), ("gpt", demonstration.response))
            file.write(json.dumps({"conversations": [{"from": who, "value": text} for who, text in turns]}) + "\n")


def tokenizer_texts() -> list[str]:
    """Problems and demonstrations of a stream of their own, so that every seed and size has the same tokenizer."""
    rng = random_stream(0, "tokenizer")
    texts = ["user\n", "assistant\n"] * NUM_TOKENIZER_TEXTS  # what the chat template puts around them
    for _ in range(NUM_TOKENIZER_TEXTS):
        problem = draw_problem(rng)
        texts += [problem.question, demonstrate(rng, problem).response]
    return texts


def main(arguments: Sequence[str] | None = None) -> None:
    defaults = TaskSettings()
    parser = argparse.ArgumentParser(description="Write the quickstart's model, prompts and demonstrations.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; reused if it has this task already")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--num-demonstrations", type=int, default=defaults.num_demonstrations)
    parser.add_argument("--num-train", type=int, default=defaults.num_train, help="prompts for reinforcement learning")
    parser.add_argument("--num-valid", type=int, default=defaults.num_valid, help="held-out prompts")
    options = vars(parser.parse_args(arguments))
    out = options.pop("out")
    try:
        written = make_task(out, TaskSettings(**options))
    except ValueError as error:
        parser.error(str(error))
    if not written:
        print(f"{out}: has this task already, reused")
        return
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        print(f"{path}  {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
