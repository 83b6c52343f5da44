import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from megatron_arpo.data.chat import encode_demonstration, encode_prompt, encode_result

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


def test_results_have_the_ids_of_a_rollout_and_no_loss(tokenizer):
    """A space before the tag belongs to the result, a line break there is the model's."""
    results = [" <result>\n2\n</result>", "<result></result>", "<result>é</result>"]
    parts = ["<python>1+1</python>", results[0], " so <python>2", results[1], "\n", results[2], "<answer>2</answer>"]
    token_ids, loss_mask = encode_demonstration(tokenizer, MESSAGES, "".join(parts))
    expected = [(token, 0) for token in encode_prompt(tokenizer, MESSAGES)]
    for part in parts:
        expected += [(token, int(part not in results)) for token in encode_result(tokenizer, part)]
    expected.append((tokenizer.eos_token_id, 1))
    assert list(zip(token_ids, loss_mask, strict=True)) == expected


@pytest.mark.parametrize("text", ["a", "a<|im_end|>", "a <result>1</result>", "<result>never closed"])
def test_one_end_of_text_is_learned(tokenizer, text):
    token_ids, loss_mask = encode_demonstration(tokenizer, MESSAGES, text)
    response = token_ids[len(encode_prompt(tokenizer, MESSAGES)) :]
    assert response.count(tokenizer.eos_token_id) == 1
    assert (token_ids[-1], loss_mask[-1]) == (tokenizer.eos_token_id, 1)
    assert tokenizer.decode(response) == text.removesuffix("<|im_end|>") + "<|im_end|>"


def test_a_tokenizer_without_an_end_is_refused(tokenizer):
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, chat_template=TEMPLATE)
    with pytest.raises(ValueError, match="eos_token is unset; set it"):
        encode_demonstration(endless, MESSAGES, "a")
