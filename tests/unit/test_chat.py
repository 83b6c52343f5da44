import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from megatron_arpo.data.chat import encode_parts, encode_prompt, encode_result, split_demonstration

MESSAGES = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"})
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level BPE with a beginning-of-text token that only `add_special_tokens` would put before a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(["<think> <result>\n1\n</result> <python> so <answer></answer>"] * 20, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="<|im_end|>", chat_template=TEMPLATE)


def test_a_prompt_is_a_plain_tuple_of_ints(tokenizer):
    token_ids = encode_prompt(tokenizer, MESSAGES)
    assert type(token_ids) is tuple
    assert all(type(token) is int for token in token_ids)
    assert tokenizer.decode(token_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_result_gets_no_special_tokens(tokenizer):
    text = " <result>\n2\n</result>"
    assert tokenizer.encode(text)[0] == tokenizer.bos_token_id
    token_ids = encode_result(tokenizer, text)
    assert type(token_ids) is tuple
    assert tokenizer.bos_token_id not in token_ids
    assert tokenizer.decode(token_ids) == text


def encode(tokenizer, messages, *, all_turns=True, learn_results=False):
    parts = split_demonstration(tokenizer, messages, all_turns=all_turns, learn_results=learn_results)
    return encode_parts(tokenizer, [parts])[0]


def answer(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("learn_results", [False, True])
def test_results_have_the_ids_of_a_rollout_and_no_loss(tokenizer, learn_results):
    """A space before the tag belongs to the result, a line break there is the model's."""
    results = [" <result>\n2\n</result>", "<result></result>", "<result>é</result>"]
    parts = ["<python>1+1</python>", results[0], " so <python>2", results[1], "\n", results[2], "<answer>2</answer>"]
    token_ids, loss_mask = encode(tokenizer, (*MESSAGES, answer("".join(parts))), learn_results=learn_results)
    expected = [(token, 0) for token in encode_prompt(tokenizer, MESSAGES)]
    for part in parts:
        expected += [(token, int(learn_results or part not in results)) for token in encode_result(tokenizer, part)]
    expected.append((tokenizer.eos_token_id, 1))
    assert list(zip(token_ids, loss_mask, strict=True)) == expected


@pytest.mark.parametrize("text", ["a", "a<|im_end|>", "a <result>1</result>", "<result>never closed"])
def test_one_end_of_text_is_learned(tokenizer, text):
    token_ids, loss_mask = encode(tokenizer, (*MESSAGES, answer(text)))
    response = token_ids[len(encode_prompt(tokenizer, MESSAGES)) :]
    assert response.count(tokenizer.eos_token_id) == 1
    assert (token_ids[-1], loss_mask[-1]) == (tokenizer.eos_token_id, 1)
    assert tokenizer.decode(response) == text.removesuffix("<|im_end|>") + "<|im_end|>"


TURNS = (*MESSAGES, answer("one <result>5</result>"), {"role": "user", "content": "And 2?"}, answer("two<|im_end|>"))


def test_all_turns_are_learned_from_what_generation_would_see(tokenizer):
    token_ids, loss_mask = encode(tokenizer, TURNS)
    learned = tokenizer.decode([token for token, mask in zip(token_ids, loss_mask, strict=True) if mask])
    assert learned == "one<|im_end|>two<|im_end|>"
    for index in (2, 4):  # each answer stands behind the very ids of its prompt
        prompt_ids = list(encode_prompt(tokenizer, TURNS[:index]))
        assert token_ids[: len(prompt_ids)] == prompt_ids
    assert tokenizer.decode(token_ids) == tokenizer.decode(encode_prompt(tokenizer, TURNS[:4])) + "two<|im_end|>"


def test_the_last_turn_alone_has_the_same_ids(tokenizer):
    token_ids, loss_mask = encode(tokenizer, TURNS, all_turns=False)
    assert token_ids == encode(tokenizer, TURNS)[0]
    assert tokenizer.decode([token for token, mask in zip(token_ids, loss_mask, strict=True) if mask]) == "two<|im_end|>"


FORGETFUL = TEMPLATE.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
ENDLESS = TEMPLATE.replace("<|im_end|>", "<end>")


@pytest.mark.parametrize("template", [FORGETFUL, ENDLESS])
def test_a_template_that_rewrites_answers_learns_the_last_turn_only(tokenizer, template):
    turns = (*MESSAGES, answer("<think>1</think>2"), {"role": "user", "content": "And 2?"}, answer("<think>2</think>4"))
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>", chat_template=template)
    with pytest.raises(ValueError, match=r"once message 4 follows; set sft\.learn: last_turn"):
        encode(other, turns)
    assert encode(other, turns[:3])[0][-1] == encode(other, turns, all_turns=False)[0][-1] == other.eos_token_id


def test_many_at_once_are_as_one_by_one(tokenizer):
    split = [split_demonstration(tokenizer, turns, all_turns=True, learn_results=False) for turns in (TURNS, TURNS[:3])]
    assert encode_parts(tokenizer, split) == [encode(tokenizer, TURNS), encode(tokenizer, TURNS[:3])]
    assert encode_parts(tokenizer, []) == []


def test_a_tokenizer_without_an_end_is_refused(tokenizer):
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, chat_template=TEMPLATE)
    with pytest.raises(ValueError, match="eos_token is unset; set it"):
        encode(endless, (*MESSAGES, answer("a")))
