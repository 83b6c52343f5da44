import json

import pytest

from megatron_arpo.rollout.record import read_step, tree_from_json, tree_to_json, write_step
from megatron_arpo.types import (
    BranchDecision,
    LeafReward,
    Prompt,
    RolloutTree,
    Segment,
    ToolCall,
    ToolResult,
    VersionRun,
)

AWKWARD = 0.1 + 0.2


def a_tree(prompt_id="p-1", score=1.1):
    decision = BranchDecision(initial_entropy=0.1, entropy=1 / 3, entropy_error=1e-17, probability=0.5, drawn=0.25, num_forks=1)
    return RolloutTree(
        prompt=Prompt(
            prompt_id=prompt_id,
            messages=({"role": "user", "content": 'Was ist "2 + 3"?\u2028 \n🙂'},),
            answer=("5", "fünf"),
            source="gsm8k",
            metadata={"ability": "math", "level": [1, 2], "nested": {"x": None}},
        ),
        segments=(
            Segment(segment_id=0, parent_id=-1, kind="prompt", token_ids=(1, 2)),
            Segment(
                segment_id=1,
                parent_id=0,
                kind="model",
                token_ids=(3, 4),
                logprobs=(-AWKWARD, -5e-324),
                entropies=(2.0, 1.7976931348623157e308),
                max_entropy_error=1e-3,
                weight_versions=(VersionRun(2, 1), VersionRun(3, 1)),
                finish_reason="tool_call",
            ),
            Segment(
                segment_id=2,
                parent_id=1,
                kind="tool",
                token_ids=(5,),
                tool_call=ToolCall(name="python", arguments="print('5')\n"),
                tool_result=ToolResult(text="5", status="timeout", latency_s=0.1, cached=True, num_tries=2),
            ),
            Segment(
                segment_id=3,
                parent_id=2,
                kind="model",
                token_ids=(6,),
                logprobs=(-1.0,),
                entropies=(0.0,),
                finish_reason="stop",
                decision=decision,
            ),
            Segment(
                segment_id=4,
                parent_id=2,
                kind="model",
                token_ids=(7,),
                logprobs=(-1.0,),
                entropies=(0.0,),
                finish_reason="length",
            ),
        ),
        leaf_ids=(3, 4),
        leaf_budget=2,
        root_entropy=AWKWARD,
        rewards=(LeafReward(score=score, reason="f1", parts={"f1": 1.0}), LeafReward(score=-1.0)),
    )


def test_the_round_trip_is_exact(tmp_path):
    trees = [a_tree("a"), a_tree("b", score=1e-300)]
    assert tree_from_json(json.loads(json.dumps(tree_to_json(trees[0])))) == trees[0]
    path = tmp_path / "step-1.jsonl"
    write_step(path, iter(trees))
    assert read_step(path) == trees
    assert len(path.read_bytes().splitlines()) == 2
    assert isinstance(read_step(path)[0].segments[1].token_ids, tuple)


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "step-1.jsonl"
    write_step(path, [a_tree("old")])

    def breaks():
        yield a_tree("new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_step(path, breaks())
    assert read_step(path) == [a_tree("old")]


def test_what_json_cannot_hold_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="tree p-1 cannot be written as JSON"):
        write_step(tmp_path / "step.jsonl", [a_tree(score=float("nan"))])


def without(field):
    record = tree_to_json(a_tree())
    del record["segments"][1][field]
    return json.dumps(record)


def with_segment(**changes):
    record = tree_to_json(a_tree())
    record["segments"][1] |= changes
    return json.dumps(record)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": {"prompt_id": "p', "Invalid control character"),
        ("[]", "tree must be dict, got list"),
        (without("logprobs"), r"segments\[1\]: missing fields \['logprobs'\]"),
        (with_segment(extra=1), r"unknown fields \['extra'\]"),
        (with_segment(token_ids="34"), r"segments\[1\].token_ids must be list, got str"),
        (with_segment(token_ids=[3, 4.0]), r"segments\[1\].token_ids must be int, got float"),
        (with_segment(kind="modle"), r"segments\[1\].kind must be one of"),
        (with_segment(finish_reason="bored"), r"segments\[1\].finish_reason must be one of"),
        (with_segment(token_ids=[3]), "must have equal lengths"),
        (with_segment(parent_id=3), "segment 1 has parent 3"),
        ("", "Expecting value"),
    ],
)
def test_a_corrupt_record_is_named_by_file_and_line(tmp_path, line, message):
    path = tmp_path / "step-7.jsonl"
    path.write_text(json.dumps(tree_to_json(a_tree())) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"step-7.jsonl, line 2: not a rollout tree: .*" + message):
        read_step(path)


def test_cut_in_the_middle_of_a_character(tmp_path):
    path = tmp_path / "step.jsonl"
    path.write_bytes('{"prompt": "ü'.encode()[:-1])
    with pytest.raises(ValueError, match="line 1"):
        read_step(path)
