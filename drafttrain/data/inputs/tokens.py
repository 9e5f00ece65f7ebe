"""Rows of inputs -> the tokens a target is given: a function for each kind of input.

Encoder-decoder targets get what their tokenizer makes of a text, end of sentence included.
Decoder-only targets go on with the prompt, so it keeps the tokens that the tokenizer puts before a
text (BOS) and loses those it puts after it (EOS). Chats are rendered with the tokenizer's template,
which writes all special tokens itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import datasets
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from drafttrain.config.base import ConfigError
from drafttrain.data.inputs.rows import CHATS


def tokenize_prompts(
    tokenizer: PreTrainedTokenizerBase, rows: datasets.Dataset, decoder_only: bool
) -> list[list[int]]:
    """The tokens of every row of `load_inputs`; of chats, up to where the assistant is to speak.

    None for a row with nothing to decode. Raises ConfigError for chats that the tokenizer has no
    template for, or that it refuses.
    """
    if CHATS not in rows.column_names:
        return tokenize_texts(tokenizer, rows["source"][:], decoder_only)
    check_chats(tokenizer, rows, decoder_only)
    chats = [
        _render(tokenizer, chat, row) if text else ""
        for row, text, chat in zip(rows["row"][:], rows["source"][:], rows[CHATS][:], strict=True)
    ]
    return tokenizer(chats, add_special_tokens=False, verbose=False)["input_ids"]


def tokenize_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], decoder_only: bool
) -> list[list[int]]:
    """The tokens of plain texts. Nothing is added to them but the tokenizer's special tokens."""
    if not texts:
        return []
    if not decoder_only:
        return tokenizer(list(texts), verbose=False)["input_ids"]
    encoded = tokenizer(list(texts), return_special_tokens_mask=True, verbose=False)
    return [
        _without_end(ids, added)
        for ids, added in zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
    ]


def check_chats(
    tokenizer: PreTrainedTokenizerBase, rows: datasets.Dataset, decoder_only: bool
) -> None:
    """Chats need a decoder-only target whose tokenizer has a template. Raises ConfigError."""
    if CHATS not in rows.column_names:
        return
    if not decoder_only:
        raise ConfigError(
            "the inputs are chats, but an encoder-decoder target needs one text a row: name its "
            "column with data.input_column, and leave data.chat out"
        )
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the inputs are chats, but the tokenizer of {tokenizer.name_or_path!r} has no chat "
            "template; put a chat_template.jinja beside it, or give plain texts "
            "(data.input_column, and data.chat=false)"
        )


def _without_end(ids: list[int], added: list[int]) -> list[int]:
    """Drops what the tokenizer has put after the text; all of it where there is no text."""
    last = max((place for place, special in enumerate(added) if not special), default=-1)
    return ids[: last + 1]


def _render(tokenizer: PreTrainedTokenizerBase, chat: Sequence[Mapping[str, str]], row: int) -> str:
    try:
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ConfigError(
            f"row {row}: the chat template of {tokenizer.name_or_path!r} refuses this chat "
            f"({error}); mend the row, or leave it out with data.skip, data.limit or data.where"
        ) from None
