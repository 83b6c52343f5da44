import json

import pytest

from megatron_arpo.reward import score_file as score_file_module
from megatron_arpo.reward.score_file import ScoreSummary, score_file

GOOD = {"solution": "<think>t</think><answer>\\boxed{Zürich}</answer>", "answer": ["Zürich", "Bern"], "id": 7}
WRONG = {"solution": "Zürich", "answer": "Zürich"}


def write(path, *rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_rows_are_kept_and_scored(tmp_path):
    source, target = write(tmp_path / "in.jsonl", GOOD, "", WRONG), tmp_path / "out.jsonl"
    assert score_file("deep_research", source, target) == ScoreSummary(num_rows=2, mean=0.0)
    assert read(target) == [
        {**GOOD, "score": 1.0, "reason": "correct answer, get f1 score: 1.0"},
        {**WRONG, "score": -1.0, "reason": "bad format: <think> or </think> not found"},
    ]
    assert "Zürich" in target.read_text(encoding="utf-8")
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_a_file_can_be_scored_anew_in_place(tmp_path):
    source = write(tmp_path / "in.jsonl", {**WRONG, "score": 5, "reason": "old"})
    score_file("qa", str(source), str(source))
    assert read(source) == [{**WRONG, "score": 1.0, "reason": "answer 'Zürich'"}]


def test_half_a_surrogate_pair_survives(tmp_path):
    source, target = write(tmp_path / "in.jsonl", {"solution": "\ud83d x", "answer": "x"}), tmp_path / "out.jsonl"
    score_file("qa", source, target)
    assert read(target)[0]["solution"] == "\ud83d x"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{broken", "line 2: is not JSON"),
        ("[1]", "line 2: is a list"),
        ({"answer": "x"}, "line 2: field 'solution' is missing; add it"),
        ({"solution": "x"}, "line 2: field 'answer' is missing; add it"),
        ({"solution": None, "answer": "x"}, "line 2: field 'solution' is None; write"),
        ({"solution": "x", "answer": 5}, "line 2: field 'answer' is 5; write"),
        ({"solution": "x", "answer": []}, "line 2: field 'answer' is"),
        ({"solution": "x", "answer": ["x", 5]}, "line 2: field 'answer' is"),
    ],
)
def test_a_bad_row_leaves_nothing_written(tmp_path, row, message):
    source, target = write(tmp_path / "in.jsonl", GOOD, row), write(tmp_path / "out.jsonl", "old")
    with pytest.raises(ValueError, match=r"in\.jsonl") as caught:
        score_file("deep_research", source, target)
    assert message in str(caught.value)
    assert target.read_text() == "old\n"
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_an_interrupt_leaves_nothing_written(tmp_path, monkeypatch):
    def interrupted(solution, answers):
        raise KeyboardInterrupt

    monkeypatch.setattr(score_file_module, "get_reward", lambda name: interrupted)
    source = write(tmp_path / "in.jsonl", GOOD)
    with pytest.raises(KeyboardInterrupt):
        score_file("deep_research", source, tmp_path / "out.jsonl")
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl"}


def test_files_that_cannot_be_used(tmp_path):
    source = write(tmp_path / "in.jsonl", GOOD)
    with pytest.raises(ValueError, match=r"missing\.jsonl: cannot be read"):
        score_file("qa", tmp_path / "missing.jsonl", tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match=r"empty\.jsonl: holds no rows"):
        score_file("qa", write(tmp_path / "empty.jsonl"), tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match=r"out.jsonl: cannot be written"):
        score_file("qa", source, tmp_path / "no_folder" / "out.jsonl")
    with pytest.raises(ValueError, match="cannot be written"):
        score_file("qa", source, tmp_path)
    with pytest.raises(ValueError, match="reward='f1' is unknown"):
        score_file("f1", source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
