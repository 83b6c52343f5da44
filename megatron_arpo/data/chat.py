"""Messages and tool results -> token ids, one function for each, so that training and rollout see the same ids.

Everything is encoded without special tokens of the tokenizer's own; those of the chat template are in the template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Part:
    """A text that is encoded by itself and learned whole or not at all; `text` None is the end-of-text token."""

    text: str | None
    is_learned: bool


def split_demonstration(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], *, all_turns: bool, learn_results: bool
) -> list[Part]:
    """A conversation that ends with an assistant's message, cut where the loss mask or the encoding changes.

    Learned are the assistant's messages, or the last one alone, each with the end-of-text token behind it, which is not
    doubled where a text ends with it. Result spans are parts of their own, as a rollout would append them, and learned
    only with `learn_results`; a <result> that is never closed is text like any other. Everything else is the template's.

    With `all_turns` each answer is put behind the very prompt that asks for it, so every turn is learned from the ids that
    generation would see. Raises ValueError where the chat template does not allow that, because it rewrites earlier
    answers or ends them without the tokenizer's end-of-text token, and for a tokenizer without such a token.

    Example: of "<python>1</python> <result>1</result>so 1", "<python>1</python>", "so 1" and the end are learned.
    """
    end = tokenizer.eos_token
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer's eos_token is unset; set it to the token that ends the assistant's turn")
    messages = [{**one, "content": one["content"].removesuffix(end)} if one["role"] == "assistant" else dict(one) for one in messages]
    answers = [index for index, one in enumerate(messages) if one["role"] == "assistant"] if all_turns else [len(messages) - 1]
    parts: list[Part] = []
    written = ""
    for index in answers:
        prompt = tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, tokenize=False)
        if not prompt.startswith(written):
            raise ValueError(
                f"the chat template changes an assistant's turn, or ends it without eos_token {end!r}, once message {index} follows; "
                f"set sft.learn: last_turn, or use a template that only appends"
            )
        answer = messages[index]["content"]
        parts.append(Part(prompt[len(written) :], False))
        for position, text in enumerate(_RESULT_SPAN.split(answer)):  # texts and spans take turns
            parts.append(Part(text, learn_results or position % 2 == 0))
        parts.append(Part(None, True))
        written = prompt + answer + end
    return parts


def encode_parts(tokenizer: PreTrainedTokenizerBase, demonstrations: Sequence[Sequence[Part]]) -> list[tuple[list[int], list[int]]]:
    """(token ids, loss mask) of each demonstration; the mask is 1 where a token is learned.

    All texts go through the tokenizer in one call, which uses every core it is given.
    """
    texts = [part.text for parts in demonstrations for part in parts if part.text]
    encoded = iter(tokenizer(texts, add_special_tokens=False).input_ids if texts else ())
    found: list[tuple[list[int], list[int]]] = []
    for parts in demonstrations:
        token_ids: list[int] = []
        loss_mask: list[int] = []
        for part in parts:
            part_ids = [tokenizer.eos_token_id] if part.text is None else next(encoded) if part.text else []
            token_ids += part_ids
            loss_mask += [int(part.is_learned)] * len(part_ids)
        found.append((token_ids, loss_mask))
    return found
