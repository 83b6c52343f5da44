"""The quickstart's model folder: a randomly initialised Qwen3 of about 1 M parameters and a tokenizer of 400 tokens.

Small enough for two CPU cores, but a usual Hugging Face folder: engine, conversion and actor read it like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

PAD, TURN_START, TURN_END = "<pad>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, TURN_START, TURN_END)
TAGS = tuple(f"<{slash}{name}>" for name in ("think", "python", "search", "result", "answer") for slash in ("", "/"))
"""One token each, but not special: decoding that skips special tokens must keep what reward and tool parser read."""

VOCAB_SIZE = 400
"""Even, so that two tensor-parallel ranks split it."""

MAX_POSITIONS = 4096

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
"""ChatML; a system message is a message like any other, none is added."""


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, trained on `texts` cut at the tags. Any text survives encode and decode.

    Raises ValueError where `texts` have too few different words to fill VOCAB_SIZE.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL_TOKENS, *TAGS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tags = re.compile("|".join(map(re.escape, TAGS)))
    tokenizer.train_from_iterator((part for text in texts for part in tags.split(text)), trainer)
    tokenizer = _with_ordinary_tags(tokenizer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the texts give a vocabulary of {tokenizer.get_vocab_size()}, not {VOCAB_SIZE}; train on more text")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        chat_template=CHAT_TEMPLATE,
    )


def _with_ordinary_tags(tokenizer: Tokenizer) -> Tokenizer:
    """The trainer reserves tokens only as special ones; the library has no call that makes them ordinary again."""
    saved = json.loads(tokenizer.to_str())
    for token in saved["added_tokens"]:
        token["special"] = token["content"] not in TAGS
    return Tokenizer.from_str(json.dumps(saved))


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Random float32 weights that depend on `seed` only; the caller's random state is left as it was."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def write_model(folder: Path, texts: Iterable[str], seed: int) -> int:
    """Tokenizer trained on `texts` and random model into `folder`. Returns the number of parameters."""
    tokenizer = train_tokenizer(texts)
    model = make_model(tokenizer, seed)
    logging.disable_progress_bar()  # saving is one small file, and the program prints a line for each
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return model.num_parameters()
