"""The quickstart's task: right where it should be, flawed where it says so, and a model folder others can read."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart"
sys.path.insert(0, str(EXAMPLE))  # the examples are programs, not a package

import make_task as task  # noqa: E402
import tiny_model  # noqa: E402
import word_problems  # noqa: E402

SMALL = task.TaskSettings(seed=3, num_demonstrations=60, num_train=40, num_valid=20)
RESPONSE = re.compile(
    r"<think> [a-z ]+ </think><python> print\((?P<code>[-+*() \d]+)\) </python>"
    r" <result>\n(?P<result>-?\d+)\n</result>"
    r"<think> done </think><answer> (?P<box>\\boxed\{)?(?P<answer>-?\d+)(?(box)\}) </answer>"
)
GUESS = re.compile(r"<think> easy </think><answer> \\boxed\{(?P<answer>-?\d+)\} </answer>")
QUESTION = {"a": 300, "b": 20, "c": 5, "name": "Eva", "things": "pens"}


def calculate(code: str) -> int:
    """Independent of the example's evaluator: post-order over the syntax tree with a stack."""
    stack: list[int] = []

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            visit(child)
        if isinstance(node, ast.Constant):
            stack.append(node.value)
        elif isinstance(node, ast.BinOp):
            right, left = stack.pop(), stack.pop()
            stack.append({ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}[type(node.op)])

    visit(ast.parse(code, mode="eval"))
    (value,) = stack
    return value


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quickstart") / "task"
    assert task.make_task(out, SMALL)
    return out


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    return AutoTokenizer.from_pretrained(folder / "model")


@pytest.fixture(scope="module")
def demonstrations() -> list[word_problems.Demonstration]:
    rng = word_problems.random_stream(0, "test")
    return [word_problems.demonstrate(rng, word_problems.draw_problem(rng)) for _ in range(6000)]


@pytest.mark.parametrize(
    ("num_steps", "index", "answer"),
    [
        (1, 0, "320"),  # 300 + 20
        (1, 1, "280"),  # 300 - 20
        (1, 2, "6000"),  # 300 * 20
        (1, 3, "320"),  # has 300, buys 20
        (1, 4, "280"),  # had 300, gave away 20
        (1, 5, "6000"),  # 20 boxes of 300
        (2, 0, "6005"),  # 300 * 20 + 5
        (2, 1, "6005"),  # 300 boxes of 20, buys 5
        (2, 2, "5995"),  # 300 boxes of 20, gave away 5
        (2, 3, "315"),  # 300 red, 20 blue, gave away 5
        (2, 4, "1600"),  # 300 red and 20 blue in each of 5 boxes
    ],
)
def test_template_answers_its_question(num_steps: int, index: int, answer: str) -> None:
    problem = word_problems.fill(word_problems.TEMPLATES[num_steps][index], num_steps, **QUESTION)
    assert problem.answer == answer
    assert all(str(calculate(mistake)) != answer for mistake, _ in problem.mistakes)


def test_every_template_is_covered_above() -> None:
    assert {num_steps: len(templates) for num_steps, templates in word_problems.TEMPLATES.items()} == {1: 6, 2: 5}


def test_evaluate_refuses_anything_but_arithmetic() -> None:
    assert word_problems.evaluate("(112 + 20) * 5") == 660
    for source in ("__import__('os')", "2 ** 3", "1.5 + 1", "True + 1"):
        with pytest.raises(ValueError, match="not integers"):
            word_problems.evaluate(source)


def test_demonstrations_are_right_but_for_their_flaw(demonstrations: list[word_problems.Demonstration]) -> None:
    for demonstration in demonstrations:
        problem, flaw = demonstration.problem, demonstration.flaw
        gold = calculate(problem.expression)
        assert problem.answer == str(gold)
        if flaw == "no_tool":
            guess = GUESS.fullmatch(demonstration.response)
            assert guess and guess["answer"] != problem.answer
            continue
        match = RESPONSE.fullmatch(demonstration.response)
        assert match, demonstration.response
        assert (match["box"] is None) == (flaw == "format")
        assert str(calculate(match["code"])) == match["result"], "the code gives the result that is shown"
        assert (match["answer"] == match["result"]) == (flaw != "copy")
        assert (match["code"] == problem.expression) == (flaw not in ("operation", "digit"))
        assert (match["answer"] == problem.answer) == (flaw in (None, "format"))


def test_flaws_have_the_stated_shares(demonstrations: list[word_problems.Demonstration]) -> None:
    assert [word_problems.FLAW_SHARE[1], word_problems.FLAW_SHARE[2]] == [0.30, 0.75]
    for num_steps, share in word_problems.FLAW_SHARE.items():
        flaws = Counter(d.flaw for d in demonstrations if d.problem.num_steps == num_steps)
        assert 1 - flaws[None] / flaws.total() == pytest.approx(share, abs=0.03)
        weights = word_problems.FLAW_WEIGHTS[num_steps]
        assert sum(weights.values()) == 100
        for flaw, percent in weights.items():
            assert flaws[flaw] / flaws.total() == pytest.approx(share * percent / 100, abs=0.025)
    two_step_share = sum(d.problem.num_steps == 2 for d in demonstrations) / len(demonstrations)
    assert two_step_share == pytest.approx(0.5, abs=0.03)


def test_same_settings_same_bytes_and_another_seed_other_ones(folder: Path, tmp_path: Path) -> None:
    assert task.make_task(tmp_path / "again", SMALL)
    assert contents(tmp_path / "again") == contents(folder)
    assert task.make_task(tmp_path / "other", dataclasses.replace(SMALL, seed=4))
    differing = {name for name, data in contents(tmp_path / "other").items() if data != contents(folder)[name]}
    assert differing == {
        "train.parquet",
        "valid.parquet",
        "demonstrations.jsonl",
        "model/model.safetensors",
        "task.json",
    }


def test_folder_is_reused_or_refused_never_mixed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(folder)
    sizes = ["--num-demonstrations", "60", "--num-train", "40", "--num-valid", "20"]
    task.main(["--out", str(folder), "--seed", "3", *sizes])
    assert "reused" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        task.main(["--out", str(folder), "--seed", "4", *sizes])
    assert "other settings" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is no quickstart task"):
        task.make_task(folder / "model", SMALL)
    assert contents(folder) == before


def test_interrupted_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leftover = tmp_path / "task.partial" / "valid.parquet"
    leftover.parent.mkdir()
    leftover.write_bytes(b"of a killed run")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(task, "write_demonstrations", interrupt)
        with pytest.raises(KeyboardInterrupt):
            task.make_task(tmp_path / "task", SMALL)
    assert list(tmp_path.iterdir()) == []


def test_counts_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="--num-valid=0 must be at least 1"):
        task.TaskSettings(num_valid=0)


def test_splits_have_their_sizes_and_no_question_twice(folder: Path) -> None:
    splits = {name: pq.read_table(folder / f"{name}.parquet").to_pylist() for name in ("train", "valid")}
    conversations = [json.loads(line)["conversations"] for line in (folder / "demonstrations.jsonl").open(encoding="utf-8")]
    assert {tuple(turn["from"] for turn in turns) for turns in conversations} == {("human", "gpt")}
    questions = {name: [row["prompt"][0]["content"] for row in rows] for name, rows in splits.items()}
    questions["demonstrations"] = [turns[0]["value"] for turns in conversations]
    assert {name: len(texts) for name, texts in questions.items()} == {"train": 40, "valid": 20, "demonstrations": 60}
    assert len({text for texts in questions.values() for text in texts}) == 120


def test_held_out_prompts_do_not_depend_on_the_other_sizes(folder: Path) -> None:
    problems = word_problems.draw_distinct_problems(word_problems.random_stream(SMALL.seed, "valid"), 5, set())
    rows = pq.read_table(folder / "valid.parquet").slice(0, 5).to_pylist()
    assert [row["prompt"][0]["content"] for row in rows] == [problem.question for problem in problems]


def test_prompts_have_the_published_columns(folder: Path) -> None:
    table = pq.read_table(folder / "valid.parquet")
    assert table.schema.equals(task.PROMPT_SCHEMA)
    assert table.column_names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    row = table.slice(7, 1).to_pylist()[0]
    question = row["prompt"][0]["content"]
    assert row["prompt"] == [{"content": question, "role": "user"}]
    assert row["extra_info"] == {"index": 7, "need_tools_kwargs": True, "question": question, "split": "valid"}
    assert row["reward_model"]["style"] == "rule"
    assert re.fullmatch(r"-?\d+", row["reward_model"]["ground_truth"])


def test_tokenizer_has_400_tokens_and_one_a_tag(tokenizer) -> None:
    assert len(tokenizer) == tokenizer.vocab_size == 400
    assert sorted(tokenizer.get_vocab().values()) == list(range(400))
    assert len(tiny_model.TAGS) == 10
    for token in (*tiny_model.SPECIAL_TOKENS, *tiny_model.TAGS):
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode(token)) == [token]
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<pad>", None)
    assert set(tokenizer.all_special_tokens) == set(tiny_model.SPECIAL_TOKENS)
    assert len(tokenizer.encode("2024")) == 4, "digits stay single"


RESERVED = st.sampled_from([*tiny_model.TAGS, *tiny_model.SPECIAL_TOKENS, " ,", " 's"])


@settings(deadline=None, max_examples=100)
@given(text=st.lists(st.text() | RESERVED).map("".join))
def test_any_text_survives_the_tokenizer(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tags_stay_where_special_tokens_are_skipped(tokenizer) -> None:
    text = "<think> add </think><python> print(1 + 2) </python> <result>\n3\n</result>"
    assert tokenizer.decode(tokenizer.encode(text + "<|im_end|><pad>"), skip_special_tokens=True) == text


def test_a_turn_encodes_like_its_parts(tokenizer, demonstrations: list[word_problems.Demonstration]) -> None:
    """The rollout appends ` <result>...` as tokens of its own; fine-tuning encodes the whole turn. They must agree."""
    response = next(d.response for d in demonstrations if d.flaw is None)
    parts = re.split(r"(?<=</python>)|(?<=</result>)", response)
    assert len(parts) == 3
    assert tokenizer.encode(response) == [token for part in parts for token in tokenizer.encode(part)]


def test_chat_template_is_chatml(tokenizer) -> None:
    user, system = {"role": "user", "content": "What is 1 + 2?"}, {"role": "system", "content": "Be brief."}
    question = "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n"
    render = tokenizer.apply_chat_template
    assert render([user], tokenize=False, add_generation_prompt=True) == question + "<|im_start|>assistant\n"
    assert render([system, user], tokenize=False) == "<|im_start|>system\nBe brief.<|im_end|>\n" + question


def test_model_is_a_small_float32_qwen3(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["vocab_size"], config["dtype"]) == ("qwen3", 400, "float32")
    assert (config["tie_word_embeddings"], config["max_position_embeddings"]) == (True, 4096)
    assert 1_000_000 < model.num_parameters() < 5_000_000
    assert model.generation_config.eos_token_id == 2
    assert model.get_input_embeddings().weight.std().item() == pytest.approx(0.02, rel=0.05)
