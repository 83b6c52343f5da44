import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_arpo.data.prompts import PromptCursor, load_prompts, repair_escapes
from megatron_arpo.data.system_prompt import SYSTEM_PROMPT

BESIDE_THE_REPOSITORY = Path(__file__).parents[3] / "shared" / "data"
PUBLISHED = Path(os.environ.get("MEGATRON_ARPO_TEST_DATA") or BESIDE_THE_REPOSITORY)
needs_published_data = pytest.mark.skipif(
    not (PUBLISHED / "valid.parquet").is_file(), reason="set MEGATRON_ARPO_TEST_DATA to the published datasets"
)


def published_row(question="1 + 1?", gold="2", **fields):
    return {
        "prompt": [{"role": "system", "content": "Use \x08oxed{}."}, {"role": "user", "content": question}],
        "reward_model": {"ground_truth": gold, "style": "rule"},
        "data_source": "sums",
        "extra_info": {"question": question, "index": 7},
        **fields,
    }


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_jsonl(path, *rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_published_format(tmp_path, suffix):
    rows = [published_row(), published_row(question="\x0crac{1}{2}?", gold="0.5")]
    path = tmp_path / f"sums.{suffix}"
    found = load_prompts(write_parquet(path, rows) if suffix == "parquet" else write_jsonl(path, *rows))
    assert found.num_repaired == 2
    first, second = found.prompts
    assert (first.prompt_id, first.answer, first.source) == ("sums-0", ("2",), "sums")
    assert first.messages == (
        {"role": "system", "content": "Use \\boxed{}."},
        {"role": "user", "content": "1 + 1?"},
    )
    assert second.prompt_id == "sums-1"
    assert second.messages[1]["content"] == second.metadata["question"] == "\\frac{1}{2}?"
    assert second.metadata["index"] == 7


def test_several_golds_in_parquet(tmp_path):
    found = load_prompts(write_parquet(tmp_path / "x.parquet", [published_row(gold=["a", "b"])]))
    assert found.prompts[0].answer == ("a", "b")


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"question": "q", "answer": "x"}, ("x",)),
        ({"problem": "q", "answer": 70, "id": "0"}, ("70",)),
        ({"problem": "other", "question": "q", "answer": 0.5}, ("0.5",)),
        ({"question": "q", "answer": ["x", "y", 3]}, ("x", "y", "3")),
        ({"question": "q", "answer": "9 * 2 = 18.\n#### 1,018\n"}, ("1,018",)),
    ],
)
def test_questions_get_the_published_system_prompt(tmp_path, row, answer):
    found = load_prompts(write_jsonl(tmp_path / "aime.jsonl", row))
    (prompt,) = found.prompts
    assert prompt.messages == ({"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "q"})
    assert (prompt.answer, prompt.source, prompt.prompt_id, found.num_repaired) == (answer, "aime", "aime-0", 0)
    assert dict(prompt.metadata) == ({"id": "0"} if "id" in row else {})


def test_only_rows_with_a_broken_escape_count(tmp_path):
    rows = [{"question": "q", "answer": ["\x08oxed{1}"]}, {"question": "a\x0cb \x08", "answer": "1"}]
    found = load_prompts(write_jsonl(tmp_path / "x.jsonl", *rows))
    assert found.num_repaired == 1
    assert found.prompts[0].answer == ("\\boxed{1}",)
    assert found.prompts[1].messages[1]["content"] == "a\x0cb \x08"


TEXTS = st.text() | st.lists(st.sampled_from(["\x08", "\x0c", "oxed", "rac{", "\\", "x"])).map("".join)


@given(st.recursive(TEXTS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=6))
def test_repair_is_stable_and_leaves_the_sound_alone(value):
    repaired = repair_escapes(value)
    assert repair_escapes(repaired) == repaired
    if "oxed" not in str(value) and "rac{" not in str(value):
        assert repaired == value


def test_max_rows(tmp_path):
    parquet = write_parquet(tmp_path / "x.parquet", [published_row()] * 5)
    jsonl = write_jsonl(tmp_path / "x.jsonl", {"question": "q", "answer": "1"}, "{broken")
    assert len(load_prompts(parquet, max_rows=2).prompts) == load_prompts(parquet, max_rows=2).num_repaired == 2
    assert len(load_prompts(parquet, max_rows=9).prompts) == 5
    assert len(load_prompts(jsonl, max_rows=1).prompts) == 1
    with pytest.raises(ValueError, match="max_rows=0"):
        load_prompts(jsonl, max_rows=0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{broken", "line 2: is not JSON"),
        (b"\xff".decode("latin1"), "line 2: is not JSON"),
        ("5", "line 2: holds a int"),
        ({"answer": "1"}, "line 2: has neither 'prompt' nor 'question' nor 'problem'; add"),
        ({"question": "", "answer": "1"}, "line 2: field 'question' is ''; write"),
        ({"question": "q"}, "line 2: field 'answer' is None; write"),
        ({"question": "q", "answer": ""}, "line 2: field 'answer' is ''; write"),
        ({"question": "q", "answer": []}, "line 2: field 'answer' is []; write"),
        ({"question": "q", "answer": ["x", None]}, "line 2: field 'answer' is ['x', None]; write"),
        ({"question": "q", "answer": True}, "line 2: field 'answer' is True; write"),
        ({"question": "q", "answer": float("nan")}, "line 2: field 'answer' is nan; write"),
        ({"question": "q", "answer": {"target": "1"}}, "line 2: field 'answer' is"),
        (published_row(prompt="q"), "line 2: field 'prompt' is 'q'; write"),
        (published_row(prompt=[]), "line 2: field 'prompt' is []; write"),
        (published_row(prompt=[{"role": "user"}]), "line 2: field 'prompt' is"),
        (published_row(reward_model=None), "line 2: field 'reward_model' is None; write"),
        (published_row(reward_model={}), "line 2: field 'reward_model.ground_truth' is None; write"),
    ],
)
def test_bad_jsonl_rows(tmp_path, row, message):
    path = write_jsonl(tmp_path / "x.jsonl", {"question": "q", "answer": "1"}, row)
    with pytest.raises(ValueError, match=r"x\.jsonl") as caught:
        load_prompts(path)
    assert message in str(caught.value)


def test_bad_files(tmp_path):
    (tmp_path / "corrupt.parquet").write_bytes(b"PAR1 no parquet PAR1")
    whole = write_parquet(tmp_path / "whole.parquet", [published_row()]).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "folder.jsonl").mkdir()
    write_jsonl(tmp_path / "empty.jsonl", "")
    pq.write_table(pa.Table.from_pylist([published_row()]).slice(0, 0), tmp_path / "empty.parquet")
    write_parquet(tmp_path / "no_gold.parquet", [published_row(), published_row(gold=None)])
    write_parquet(tmp_path / "no_column.parquet", [{"prompt": published_row()["prompt"], "x": 1}])
    for name, message in {
        "missing.parquet": "is not a file; check",
        "folder.jsonl": "is not a file; check",
        "x.csv": "suffix '.csv' is unknown; give a .parquet or a .jsonl",
        "corrupt.parquet": "cannot be read as parquet",
        "cut.parquet": "cannot be read as parquet",
        "empty.jsonl": "holds no rows; give",
        "empty.parquet": "holds no rows; give",
        "no_gold.parquet": "row 1: field 'reward_model.ground_truth' is None; write",
        "no_column.parquet": "column 'reward_model' is missing; add it (there are: prompt, x)",
    }.items():
        with pytest.raises(ValueError, match=name) as caught:
            load_prompts(tmp_path / name)
        assert message in str(caught.value)


@given(num_prompts=st.integers(1, 12), seed=st.integers(0, 9), takes=st.lists(st.integers(0, 20), max_size=8))
def test_a_cursor_resumes_anywhere_and_visits_each_prompt_once_an_epoch(num_prompts, seed, takes):
    cursor, whole = PromptCursor(num_prompts, seed), PromptCursor(num_prompts, seed)
    taken = []
    for num in takes:
        cursor = PromptCursor(num_prompts, seed, *cursor.position)
        taken += cursor.take(num)
        assert cursor.position == divmod(len(taken), num_prompts)
    assert taken == whole.take(sum(takes))
    assert cursor.take(3) == whole.take(3)
    whole_epochs = PromptCursor(num_prompts, seed).take(3 * num_prompts)
    for start in range(0, 3 * num_prompts, num_prompts):
        assert sorted(whole_epochs[start : start + num_prompts]) == list(range(num_prompts))


def test_orders_depend_on_seed_and_epoch_and_stay_as_they_are():
    orders = [PromptCursor(20, seed, epoch).take(20) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert PromptCursor(6, 0).take(6) == [0, 5, 1, 4, 3, 2]


@pytest.mark.parametrize("position", [(0, 6), (0, -1), (-1, 0)])
def test_positions_that_do_not_exist(position):
    with pytest.raises(ValueError, match="must be at least 0"):
        PromptCursor(6, 0, *position)
    with pytest.raises(ValueError, match="num_prompts=0"):
        PromptCursor(0, 0)
    with pytest.raises(ValueError, match="num_indices=-1"):
        PromptCursor(6, 0).take(-1)


@needs_published_data
@pytest.mark.parametrize(
    ("name", "num_rows", "num_repaired"),
    [
        ("train_10k.parquet", 10000, 10000),
        ("hard_search_1k.parquet", 1071, 1071),
        ("valid.parquet", 180, 180),
        ("eval/gsm8k.jsonl", 1319, 0),
        ("eval/aime24.jsonl", 30, 0),
        ("eval/aime25.jsonl", 30, 2),
        ("eval/2wiki.jsonl", 200, 0),
        ("eval/xbench.jsonl", 100, 0),
    ],
)
def test_published_datasets(name, num_rows, num_repaired):
    found = load_prompts(PUBLISHED / name)
    assert (len(found.prompts), found.num_repaired) == (num_rows, num_repaired)
    assert {prompt.messages[0]["content"] for prompt in found.prompts} == {SYSTEM_PROMPT}
    assert not any("\x08" in message["content"] for prompt in found.prompts for message in prompt.messages)
