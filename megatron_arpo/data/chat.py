"""Messages and tool results -> token ids, one function for each, so that training and rollout see the same ids.

Everything is encoded without special tokens of the tokenizer's own; those of the chat template are in the template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RESULT_SPAN = re.compile(r"( ?<result>.*?</result>)", re.DOTALL)
"""What a rollout appends after a call, the space before it included."""


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
    """Token ids of `messages` in the chat template, up to where the assistant's answer begins."""
    token_ids = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,  # transformers 5 returns a BatchEncoding otherwise
    )
    return tuple(int(token) for token in token_ids)


def encode_result(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Token ids of a tool's answer, given as it is appended: `text` has the result tags and the space before them."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def encode_demonstration(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], response_text: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(token ids, loss mask) of a prompt and the response to imitate; the mask is 1 where a token is learned.

    Result spans are encoded by themselves, as a rollout would append them, and not learned; nor is the prompt. The
    tokenizer's end-of-text token is appended and learned, unless the text ends with it. A <result> that is never closed
    is text like any other. Raises ValueError for a tokenizer without an end-of-text token.

    Example: of "<python>1</python> <result>1</result>so 1", "<python>1</python>", "so 1" and the end are learned.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer's eos_token is unset; set it to the token that ends the assistant's turn")
    prompt_ids = encode_prompt(tokenizer, messages)
    token_ids = list(prompt_ids)
    loss_mask = [0] * len(prompt_ids)
    for index, part in enumerate(_RESULT_SPAN.split(response_text)):  # texts and spans take turns
        part_ids = encode_result(tokenizer, part)
        token_ids += part_ids
        loss_mask += [1 - index % 2] * len(part_ids)
    if not response_text.endswith(tokenizer.eos_token):
        token_ids.append(tokenizer.eos_token_id)
        loss_mask.append(1)
    return tuple(token_ids), tuple(loss_mask)
