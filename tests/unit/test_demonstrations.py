import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_arpo.data.demonstrations import find_demonstrations, read_demonstrations

HUMAN = {"from": "human", "value": "1 + 1?"}
GPT = {"from": "gpt", "value": "<think>easy</think><answer>\\boxed{2}</answer>"}
AGAIN = {"from": "user", "value": "And 2 + 2?"}
FOUR = {"from": "assistant", "value": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED, ANSWERED = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": GPT["value"]}
ASKED_AGAIN, ANSWERED_AGAIN = {"role": "user", "content": "And 2 + 2?"}, {"role": "assistant", "content": "4"}

SHAREGPT = [
    {"conversations": [HUMAN, GPT]},
    {"conversations": [HUMAN, GPT, AGAIN, FOUR], "system": "Be brief.", "id": 7},
    {"conversations": [AGAIN, FOUR], "system": ""},
    {"conversations": [{"from": "system", "value": "Be brief."}, AGAIN, FOUR], "system": "Replaced by the first turn."},
]
ALPACA = [
    {"instruction": "1 + 1?", "output": GPT["value"]},
    {"instruction": "And 2 + 2?", "input": "", "output": "4", "system": "Be brief.", "history": [["1 + 1?", GPT["value"]]]},
    {"instruction": "And 2 + 2?", "input": None, "output": "4", "history": None},
    {"instruction": "", "input": "And 2 + 2?", "output": "4", "system": "Be brief.", "history": []},
]
MESSAGES = [
    (ASKED, ANSWERED),
    (SYSTEM, ASKED, ANSWERED, ASKED_AGAIN, ANSWERED_AGAIN),
    (ASKED_AGAIN, ANSWERED_AGAIN),
    (SYSTEM, ASKED_AGAIN, ANSWERED_AGAIN),
]


def write(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    else:
        path.write_text("\n\n".join(map(json.dumps, rows)) if path.suffix == ".jsonl" else json.dumps(rows, indent=1), encoding="utf-8")
    return path


def read(path: Path, dataset: str | None = None) -> list[tuple]:
    return [one.messages for one in read_demonstrations(find_demonstrations(path, dataset))]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("rows", [SHAREGPT, ALPACA], ids=["sharegpt", "alpaca"])
def test_the_format_is_known_by_the_rows_keys(tmp_path, rows, suffix):
    if suffix == ".parquet":
        rows = [{name: row.get(name) for name in rows[1]} for row in rows]  # the same columns in all rows, null where a row has none
    assert read(write(tmp_path / f"x{suffix}", rows)) == MESSAGES


def test_both_formats_in_one_file(tmp_path):
    assert read(write(tmp_path / "x.json", [SHAREGPT[0], ALPACA[0]])) == [MESSAGES[0]] * 2


def test_instruction_and_input_are_two_lines(tmp_path):
    messages = read(write(tmp_path / "x.json", [{"instruction": "Add.", "input": "1 1", "output": "2"}]))
    assert messages == [({"role": "user", "content": "Add.\n1 1"}, {"role": "assistant", "content": "2"})]


def test_a_byte_order_mark_and_text_of_any_script(tmp_path):
    text = json.dumps([{"instruction": "é 😀 中", "output": "x"}], ensure_ascii=False)
    (tmp_path / "x.json").write_text("\ufeff \n" + text, encoding="utf-8")
    (tmp_path / "y.json").write_text(json.dumps(json.loads(text)), encoding="utf-8")
    assert read(tmp_path / "x.json") == read(tmp_path / "y.json")
    assert read(tmp_path / "x.json")[0][0]["content"] == "é 😀 中"


def test_broken_escapes_are_repaired_and_marked(tmp_path):
    path = write(tmp_path / "x.json", [{"instruction": "1", "output": "\x08oxed{1}"}, ALPACA[0]])
    found = list(read_demonstrations(find_demonstrations(path, None)))
    assert [(one.messages[1]["content"], one.was_repaired) for one in found] == [("\\boxed{1}", True), (GPT["value"], False)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "has neither 'conversations' (ShareGPT) nor 'instruction' and 'output' (Alpaca), but nothing; add"),
        ({"text": "x"}, "(Alpaca), but text; add them, or describe the columns in a dataset_info.json"),
        ({"conversations": "x"}, "field 'conversations' is 'x'; write a list"),
        ({"conversations": []}, "field 'conversations' has 0 turns; write pairs"),
        ({"conversations": [HUMAN]}, "field 'conversations' has 1 turns; write pairs"),
        ({"conversations": [{"from": "system", "value": "x"}]}, "field 'conversations' has 0 turns; write pairs"),
        ({"conversations": [GPT, HUMAN]}, "field 'conversations[0].from' is 'gpt'; write 'human'"),
        ({"conversations": [HUMAN, HUMAN]}, "field 'conversations[1].from' is 'human'; write 'gpt'"),
        ({"conversations": [HUMAN, {"from": "observation", "value": "x"}]}, "'conversations[1].from' is 'observation'"),
        ({"conversations": [HUMAN, {"value": "x"}]}, "field 'conversations[1].from' is None; write 'gpt'"),
        ({"conversations": [HUMAN, {"from": "gpt"}]}, "field 'conversations[1]' is {'from': 'gpt'}; write {'from': 'human' or 'gpt'"),
        ({"conversations": [HUMAN, "x"]}, "field 'conversations[1]' is 'x'; write"),
        ({"conversations": [HUMAN, {"from": "gpt", "value": " "}]}, "field 'conversations[1].value' is empty; write"),
        ({"conversations": [HUMAN, GPT], "system": 5}, "field 'system' is 5; write"),
        ({"instruction": "x"}, "field 'output' is empty; write"),
        ({"instruction": "x", "output": " "}, "field 'output' is empty; write"),
        ({"instruction": "x", "output": ["a", "b"]}, "field 'output' is ['a', 'b']; write it as text"),
        ({"output": "x"}, "field 'instruction' is None; write"),
        ({"instruction": "x", "output": "y", "input": 5}, "field 'input' is 5; write"),
        ({"instruction": "x", "output": "y", "history": [["a"]]}, "field 'history[0]' is ['a']; write [instruction, response]"),
        ({"instruction": "x", "output": "y", "history": [["a", ""]]}, "field 'history[0]' is ['a', '']; write"),
    ],
)
def test_bad_rows(tmp_path, row, message):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [SHAREGPT[0], row]))
    (tmp_path / "x.json").write_text(json.dumps([SHAREGPT[0], row]))
    for name, place in (("x.jsonl", "x.jsonl, line 2: "), ("x.json", "x.json, row 1: ")):
        with pytest.raises(ValueError, match=name) as caught:
            read(tmp_path / name)
        assert place in str(caught.value)
        assert message in str(caught.value)


def test_half_a_surrogate_pair_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"instruction": "x", "output": "\\ud83d"}')
    with pytest.raises(ValueError, match=r"line 1: the assistant's text holds half of a surrogate pair .*; remove it"):
        read(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.txt", "", "suffix '.txt' is unknown; give"),
        ("x.jsonl", "", "holds no rows; give"),
        ("x.json", "[]", "holds no rows; give"),
        ("x.json", '{"a": 1}', "holds an object; write a list of rows, or name the file .jsonl"),
        ("x.json", "", "is not JSON in UTF-8 (it begins with b''); write a list"),
        ("x.json", "x", "is not JSON in UTF-8 (it begins with b'x'); write a list"),
        ("x.json", "[5]", "row 0: is a int; write"),
        ("x.json", "[null]", "row 0: is a NoneType; write"),
        ("x.json", "[", "is not JSON in UTF-8 (parse error: premature EOF); write a list"),
        ("x.json", '[{"a": NaN}]', "is not JSON"),
        ("x.json", '[{"a": "\udcff"}]', "is not JSON in UTF-8 (lexical error: invalid bytes in UTF8 string.); write a list"),
        ("x.jsonl", "[", "line 1: is not JSON"),
        ("x.parquet", "PAR", "cannot be read as parquet"),
    ],
)
def test_bad_files(tmp_path, name, text, message):
    (tmp_path / name).write_text(text, errors="surrogateescape", encoding="utf-8")
    with pytest.raises(ValueError, match=name) as caught:
        read(tmp_path / name)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.json", "missing.parquet"])
def test_missing_files(tmp_path, name):
    with pytest.raises(ValueError, match=r"is not a file; check the path"):
        find_demonstrations(tmp_path / name, None)


def described(folder: Path, **datasets: dict) -> Path:
    (folder / "dataset_info.json").write_text(json.dumps(datasets))
    return folder


def test_described_datasets(tmp_path):
    """Columns and tags under other names, read in the order that is asked for, from the file or its folder."""
    write(tmp_path / "a.json", [{"q": "1 + 1?", "a": GPT["value"], "system": "Not named, so not read.", "history": 5}])
    open_ai = [{"messages": [SYSTEM, ASKED_AGAIN, ANSWERED_AGAIN]}]
    write(tmp_path / "b.jsonl", open_ai)
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant", "system_tag": "system"}
    folder = described(
        tmp_path,
        arith={"file_name": "a.json", "columns": {"prompt": "q", "response": "a"}},
        chat={"file_name": "b.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags},
    )
    assert read(folder, "chat, arith") == [MESSAGES[3], MESSAGES[0]]
    assert read(folder / "dataset_info.json", "arith") == [MESSAGES[0]]


def test_defaults_of_a_description(tmp_path):
    write(tmp_path / "a.parquet", [{"instruction": "1 + 1?", "input": "", "output": GPT["value"], "system": "x"}])
    write(tmp_path / "s.json", [{"conversations": [HUMAN, GPT], "system": "Be brief."}])
    folder = described(
        tmp_path,
        alpaca={"file_name": "a.parquet"},
        sharegpt={"file_name": "s.json", "formatting": "sharegpt", "columns": {"system": "system"}},
    )
    assert read(folder, "alpaca,sharegpt") == [MESSAGES[0], (SYSTEM, *MESSAGES[0])]


def test_a_described_folder_stands_for_its_files(tmp_path):
    (tmp_path / "parts").mkdir()
    for name, row in (("2.jsonl", ALPACA[2]), ("1.json", ALPACA[0])):
        write(tmp_path / "parts" / name, [row])
    (tmp_path / "parts/README.md").write_text("x")
    assert read(described(tmp_path, x={"file_name": "parts"}), "x") == [MESSAGES[0], MESSAGES[2]]


@pytest.mark.parametrize(
    ("description", "dataset", "message"),
    [
        ({}, None, "sft.dataset is missing; name one of x"),
        ({}, "y", "sft.dataset='y' is not described there; use one of x"),
        ({"hf_hub_url": "a/b"}, "x", "x: hf_hub_url is 'a/b', which is not on this machine; download it and write file_name"),
        ({"script_url": "a"}, "x", "x: script_url is 'a', which is not"),
        ({"ranking": True}, "x", "ranking is true, but preference pairs are no demonstrations"),
        ({"num_samples": 5}, "x", "key 'num_samples' is not supported; use only file_name, formatting, columns"),
        ({"split": "test"}, "x", "split is 'test', but a local file has no splits"),
        ({"formatting": "chatml"}, "x", "formatting is 'chatml'; use alpaca or sharegpt"),
        ({"columns": {"images": "images"}}, "x", "columns.images is not supported; use only prompt, query, response"),
        ({"columns": {"prompt": 5}}, "x", "columns is {'prompt': 5}; write names as text"),
        ({"tags": {"role_tag": "x"}}, "x", "tags.role_tag is not supported; leave it out"),
        ({"formatting": "sharegpt", "tags": {"rôle_tag": "x"}}, "x", "tags.rôle_tag is not supported; use only role_tag"),
        ({"file_name": None}, "x", "file_name is None; write a file beside dataset_info.json"),
        ({"file_name": "missing.json"}, "x", "missing.json: is not a file; check the path"),
        ({"file_name": "a.csv"}, "x", "suffix '.csv' is unknown"),
        ({"file_name": "empty"}, "x", "a folder without .jsonl or .json or .parquet files"),
    ],
)
def test_bad_descriptions(tmp_path, description, dataset, message):
    write(tmp_path / "a.json", [ALPACA[0]])
    (tmp_path / "empty").mkdir()
    folder = described(tmp_path, x={"file_name": "a.json", **description})
    with pytest.raises(ValueError, match=r"dataset_info\.json|missing|suffix") as caught:
        find_demonstrations(folder, dataset)
    assert message in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [("[", "is not JSON"), ("[]", "holds a list; write an object"), (None, "cannot be read")])
def test_bad_description_files(tmp_path, text, message):
    if text is not None:
        (tmp_path / "dataset_info.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        find_demonstrations(tmp_path, "x")


def test_a_dataset_needs_its_description(tmp_path):
    with pytest.raises(ValueError, match=r"sft\.dataset='x' needs sft\.demonstrations to be a dataset_info\.json or its folder"):
        find_demonstrations(write(tmp_path / "a.json", ALPACA), "x")
