"""Demonstrations -> cache -> batches: the streaming half of fine-tuning."""

import json
import os
import pickle
import random
import tracemalloc

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_arpo.data.demonstrations import find_demonstrations
from megatron_arpo.data.loader import BatchPlan, check_loader, load_batches
from megatron_arpo.data.sequence_cache import CacheWriter, SequenceCache, read_description
from megatron_arpo.data.tokenise import TokeniseSettings, tokenise

TEMPLATE = "{% for m in messages %}{{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}bot {% endif %}"
SETTINGS = TokeniseSettings(all_turns=True, learn_results=False, max_tokens=8)
ROWS = [
    {"instruction": "a", "output": "b c"},
    {"instruction": "a", "output": "b " * 9},
    {"instruction": "\x08oxed", "output": "c"},
]


@pytest.fixture(scope="module")
def tokenizer():
    """A word a token: [unknown] 0, <end> 1, bot 2, a 3, b 4, c 5."""
    words = Tokenizer(models.WordLevel({name: index for index, name in enumerate(["?", "<end>", "bot", "a", "b", "c"])}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="?", chat_template=TEMPLATE)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return find_demonstrations(tmp_path / "x.jsonl", None)


def run(files, tokenizer, folder, settings=SETTINGS):
    said = []
    cache, counts = tokenise(files, tokenizer, settings, folder, said.append)
    return cache, counts, said


def contents(cache):
    return cache.gather(np.arange(len(cache))).sequences()


def test_ids_masks_and_counts_by_hand(files, tokenizer, tmp_path):
    cache, counts, said = run(files, tokenizer, tmp_path / "run/sequences")
    assert contents(cache) == [([3, 1, 2, 4, 5, 1], [0, 0, 0, 1, 1, 1]), ([0, 1, 2, 5, 1], [0, 0, 0, 1, 1])]
    assert (counts.rows, counts.sequences, counts.tokens, counts.loss_tokens) == (3, 2, 11, 5)
    assert (counts.longest, counts.rows_too_long, counts.rows_repaired) == (6, 1, 1)
    assert said == [] and not list((tmp_path / "run").glob(".*"))


def test_the_same_input_is_not_tokenised_again(files, tokenizer, tmp_path, monkeypatch):
    first, counts, _ = run(files, tokenizer, tmp_path / "sequences")
    monkeypatch.setattr("megatron_arpo.data.tokenise.read_demonstrations", lambda files: pytest.fail("read again"))
    again, counts_again, said = run(files, tokenizer, tmp_path / "sequences")
    assert contents(again) == contents(first) and counts_again == counts and said == []


def test_other_input_is_tokenised_again_and_said(files, tokenizer, tmp_path):
    folder = tmp_path / "sequences"
    run(files, tokenizer, folder)
    path = files[0].path
    path.write_text(path.read_text() + json.dumps(ROWS[0]))
    cache, _, said = run(files, tokenizer, folder)
    assert len(cache) == 3 and "tokenising again" in said[0]
    cache, _, said = run(files, tokenizer, folder, TokeniseSettings(all_turns=True, learn_results=False, max_tokens=100))
    assert len(cache) == 4 and "tokenising again" in said[0]
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<end>", chat_template="x" + TEMPLATE)
    cache, _, said = run(files, other, folder)
    assert "tokenising again" in said[0]


@pytest.mark.parametrize("damage", ["cut", "removed", "text"])
def test_a_damaged_cache_is_made_again(files, tokenizer, tmp_path, damage):
    folder = tmp_path / "sequences"
    found = contents(run(files, tokenizer, folder)[0])
    if damage == "cut":
        os.truncate(folder / "token_ids.int32", 4)
    elif damage == "removed":
        (folder / "loss_mask.uint8").unlink()
    else:
        (folder / "description.json").write_text("{")
    assert read_description(folder) is None
    assert contents(run(files, tokenizer, folder)[0]) == found


def test_a_bad_row_is_named_and_leaves_nothing(tokenizer, tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps(ROWS[0]) + '\n{"instruction": "a"}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: field 'output' is empty"):
        run(find_demonstrations(tmp_path / "x.jsonl", None), tokenizer, tmp_path / "run/sequences")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_row_that_the_template_cannot_take_is_named(tokenizer, tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({**ROWS[0], "history": [["a", "b"]]}))
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<end>", chat_template=TEMPLATE.upper())
    other.chat_template = TEMPLATE.replace(" <end>", "")
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1: the chat template changes .* set sft\.learn: last_turn"):
        run(find_demonstrations(tmp_path / "x.jsonl", None), other, tmp_path / "sequences")


def test_nothing_left_is_refused(files, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"all 3 are longer than 2 tokens; raise sft\.max_tokens and actor\.max_row_tokens"):
        run(files, tokenizer, tmp_path / "sequences", TokeniseSettings(all_turns=True, learn_results=False, max_tokens=2))


def test_a_full_disk_is_told_in_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"the disk is full .* free space or choose another run\.dir"), CacheWriter(tmp_path / "s"):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_with_the_file(tokenizer, tmp_path):
    """Ten times the rows, hardly more memory: neither rows nor ids are kept."""
    peaks = []
    for num_rows in (512, 5 * 1024):
        path = tmp_path / f"{num_rows}.json"
        with path.open("w") as file:
            file.write("[" + ",".join(json.dumps({"instruction": "a " * 20, "output": "b"}) for _ in range(num_rows)) + "]")
        tracemalloc.start()
        tokenise(
            find_demonstrations(path, None), tokenizer, TokeniseSettings(all_turns=True, learn_results=False, max_tokens=100),
            tmp_path / f"{num_rows}.cache", print,
        )  # fmt: skip
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Sequence i has i + 1 tokens, i * 1000 and on, of which every third is learned."""
    folder = tmp_path_factory.mktemp("cache") / "sequences"
    with CacheWriter(folder) as writer:
        writer.add((range(1000 * i, 1001 * i + 1), [int(j % 3 == 0) for j in range(i + 1)]) for i in range(23))
        writer.finish("key", {"sequences": 23})
    return SequenceCache(folder)


def in_python(cache, seed, batch_size, first, last):
    """What the batches are, written out."""
    sequences = contents(cache)
    batches = []
    for epoch in range(9):
        order = list(range(len(sequences)))
        random.Random(f"sft {seed} {epoch}").shuffle(order)
        starts = range(0, len(order) - batch_size + 1, batch_size)
        batches += [[sequences[i] for i in order[start : start + batch_size]] for start in starts]
    return batches[first:last]


def loaded(cache, first=0, last=12, kind="torch", num_workers=0, seed=3):
    plan = BatchPlan(len(cache), 5, seed)
    return list(load_batches(cache, plan, first=first, last=last, kind=kind, num_workers=num_workers))


@pytest.mark.parametrize(("first", "num_workers"), [(0, 0), (0, 2), (7, 1)])
@pytest.mark.parametrize("kind", ["torch", "dali"])
def test_loaders_give_the_batches_of_plain_python(cache, kind, first, num_workers):
    """From the beginning and from batch 7 on, as a resumed run asks for them."""
    if kind == "dali":
        pytest.importorskip("nvidia.dali")
    found = loaded(cache, first, kind=kind, num_workers=num_workers)
    assert [batch.sequences() for batch in found] == in_python(cache, 3, 5, first, 12)
    for ours, theirs in zip(found, loaded(cache, first), strict=True):
        for name in ("token_ids", "loss_mask", "lengths"):
            one, other = getattr(ours, name), getattr(theirs, name)
            assert one.dtype == other.dtype and one.tobytes() == other.tobytes()


def test_epochs_have_their_own_orders_and_no_sequence_twice(cache):
    batches = loaded(cache, last=8)
    for epoch in (batches[:4], batches[4:]):
        firsts = [ids[0] for batch in epoch for ids, _ in batch.sequences()]
        assert len(set(firsts)) == 20
    assert batches[0].token_ids.tolist() != batches[4].token_ids.tolist()
    assert loaded(cache, last=1, seed=4)[0].token_ids.tolist() != batches[0].token_ids.tolist()


def test_fewer_sequences_than_a_batch_make_one(cache):
    plan = BatchPlan(3, 5, 0)
    assert plan.batches_an_epoch == 1
    assert sorted(plan.indices(0)) == sorted(plan.indices(1)) == [0, 1, 2]


def test_no_batches_left(cache):
    assert loaded(cache, first=12) == loaded(cache, first=13) == []


def test_a_cache_travels_as_its_path(cache):
    packed = pickle.dumps(cache)
    assert len(packed) < 500 and contents(pickle.loads(packed)) == contents(cache)


def test_dali_that_is_missing_is_named(monkeypatch):
    check_loader("torch")
    monkeypatch.setitem(__import__("sys").modules, "nvidia.dali", None)
    with pytest.raises(ValueError, match=r"sft\.loader=dali needs NVIDIA DALI.*pip install -e '\.\[dali\]' or use torch"):
        check_loader("dali")
