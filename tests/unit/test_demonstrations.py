import json

import pytest

from megatron_arpo.data.demonstrations import Demonstration, load_demonstrations

HUMAN = {"from": "human", "value": "1 + 1?"}
GPT = {"from": "gpt", "value": "<think>easy</think><answer>\\boxed{2}</answer>"}
AGAIN = {"from": "user", "value": "And 2 + 2?"}
FOUR = {"from": "assistant", "value": "4"}

ROWS = [
    {"conversations": [HUMAN, GPT]},
    {"conversations": [HUMAN, GPT, AGAIN, FOUR], "system": "Be brief.", "id": 7},
    {"conversations": [AGAIN, FOUR], "system": ""},
]
FOUND = [
    Demonstration(messages=({"role": "user", "content": "1 + 1?"},), response=GPT["value"]),
    Demonstration(
        messages=(
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": GPT["value"]},
            {"role": "user", "content": "And 2 + 2?"},
        ),
        response="4",
    ),
    Demonstration(messages=({"role": "user", "content": "And 2 + 2?"},), response="4"),
]


def test_jsonl_and_json(tmp_path):
    (tmp_path / "x.jsonl").write_text("\n\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    (tmp_path / "x.json").write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    assert load_demonstrations(tmp_path / "x.jsonl") == load_demonstrations(str(tmp_path / "x.json")) == FOUND


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "field 'conversations' is None; write pairs"),
        ({"conversations": []}, "field 'conversations' is a list of 0; write pairs"),
        ({"conversations": [HUMAN]}, "field 'conversations' is a list of 1; write pairs"),
        ({"conversations": [GPT, HUMAN]}, "field 'conversations[0].from' is 'gpt'; write 'human'"),
        ({"conversations": [HUMAN, HUMAN]}, "field 'conversations[1].from' is 'human'; write 'gpt'"),
        ({"conversations": [HUMAN, {"from": "observation", "value": "x"}]}, "'conversations[1].from' is 'observation'"),
        ({"conversations": [HUMAN, {"value": "x"}]}, "field 'conversations[1].from' is None; write 'gpt'"),
        ({"conversations": [HUMAN, {"from": "gpt"}]}, "field 'conversations[1]' is {'from': 'gpt'}; write"),
        ({"conversations": [HUMAN, "x"]}, "field 'conversations[1]' is 'x'; write"),
        ({"conversations": [HUMAN, {"from": "gpt", "value": " "}]}, "field 'conversations[1].value' is empty; write"),
        ({"conversations": [HUMAN, GPT], "system": 5}, "field 'system' is 5; write"),
    ],
)
def test_bad_rows(tmp_path, row, message):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [ROWS[0], row]))
    (tmp_path / "x.json").write_text(json.dumps([ROWS[0], row]))
    for name, place in (("x.jsonl", "x.jsonl, line 2: "), ("x.json", "x.json, row 1: ")):
        with pytest.raises(ValueError, match=name) as caught:
            load_demonstrations(tmp_path / name)
        assert place in str(caught.value)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.txt", "", "suffix '.txt' is unknown; give"),
        ("x.jsonl", "", "holds no rows; give"),
        ("x.json", "[]", "holds no rows; give"),
        ("x.json", "{}", "holds a dict; write a list"),
        ("x.json", "[5]", "row 0: is a int; write"),
        ("x.json", "[", "is not JSON"),
        ("x.jsonl", "[", "line 1: is not JSON"),
    ],
)
def test_bad_files(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name) as caught:
        load_demonstrations(tmp_path / name)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.json"])
def test_missing_files(tmp_path, name):
    with pytest.raises(ValueError, match=r"cannot be read .*; check the path"):
        load_demonstrations(tmp_path / name)
