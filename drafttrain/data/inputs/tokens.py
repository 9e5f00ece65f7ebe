"""Tokenisation of inputs, with a reason for each row that has no tokens.

Encoder-decoder targets get all tokens of a text, including EOS. Decoder-only targets continue the
prompt, so special tokens before the text (BOS) are kept and those after it (EOS) removed. Chats are
rendered with the tokenizer's chat template, which writes all special tokens itself.
"""

import json
import re
from collections.abc import Mapping, Sequence
from inspect import signature

import datasets
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from drafttrain.config.base import ConfigError
from drafttrain.data.inputs.chats import CHAT, Refused, text_of
from drafttrain.data.inputs.rows import REASON, describe_inputs
from drafttrain.data.shards.writing import say

TEMPLATE_ERRORS = (TemplateError, AttributeError, KeyError, IndexError, TypeError, ValueError)
ROWS_NAMED, SHOWN = 20, 60
"""Numbers of rows that are printed with a reason, and of characters before an answer."""


def tokenize_prompts(
    tokenizer: PreTrainedTokenizerBase,
    rows: datasets.Dataset,
    decoder_only: bool,
    limits: Mapping[str, int] | None = None,
    vocabulary: int | None = None,
) -> list[list[int] | Refused]:
    """Tokenises every row of `load_inputs`; chats up to the start of the assistant's answer.

    limits: maximal numbers of tokens, by the reason for each. Returns Refused for unusable rows:
    those refused when read or by the chat template, without tokens, with more tokens than a limit,
    or with a token id beyond the model's vocabulary. Chats need a template (`check_chats`).
    """
    prompts: list[str | Refused]
    if chats := CHAT in rows.column_names:
        prompts = ["" if chat is None else _render(tokenizer, chat) for chat in rows[CHAT][:]]
    else:
        prompts = rows["source"][:]
    texts = [prompt if isinstance(prompt, str) else "" for prompt in prompts]
    if chats and texts:
        found = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        found = tokenize_texts(tokenizer, texts, decoder_only)

    def checked(prompt: str | Refused, reason: str | None, ids: list[int]) -> list[int] | Refused:
        if reason is not None or isinstance(prompt, Refused):
            return prompt if reason is None else Refused(reason)
        if not ids:
            return Refused("empty")
        for words, most in (limits or {}).items():
            if len(ids) > most:
                return Refused(f"{len(ids)} tokens where {words}")
        if vocabulary is not None and max(ids) >= vocabulary:
            return Refused(f"token {max(ids)}, the target has {vocabulary} tokens")
        return ids

    return list(map(checked, prompts, rows[REASON][:], found))


def tokenize_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], decoder_only: bool
) -> list[list[int]]:
    """Tokenises plain texts with the tokenizer's special tokens. For decoder-only targets, special
    tokens after the text are removed, and an empty text has no tokens at all."""
    if not texts:
        return []
    if not decoder_only:
        return tokenizer(list(texts), verbose=False)["input_ids"]
    encoded = tokenizer(list(texts), return_special_tokens_mask=True, verbose=False)
    ends = [
        max((index + 1 for index, special in enumerate(added) if not special), default=0)
        for added in encoded["special_tokens_mask"]
    ]
    return [ids[:end] for ids, end in zip(encoded["input_ids"], ends, strict=True)]


def check_chats(
    tokenizer: PreTrainedTokenizerBase, rows: datasets.Dataset, decoder_only: bool
) -> None:
    """Raises ConfigError if the target is not decoder-only, its tokenizer has no chat template, or
    the template does not read a setting in chat_template_kwargs."""
    if not decoder_only:
        raise ConfigError(
            "the inputs are chats, but an encoder-decoder target needs one text a row: name its "
            "column with data.input_column, and leave data.chat out"
        )
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the inputs are chats, but the tokenizer of {tokenizer.name_or_path!r} has no chat "
            "template; put a chat_template.jinja next to it, or give plain texts "
            "(data.input_column, and data.chat=false)"
        )
    first = next((chat for chat in rows[CHAT] if chat is not None), "{}")
    own, read = signature(tokenizer.apply_chat_template).parameters, str(tokenizer.chat_template)
    for name in json.loads(first).get("chat_template_kwargs", ()):
        if name in own or not re.search(rf"\b{re.escape(name)}\b", read):
            raise ConfigError(
                f"chat_template_kwargs.{name}: the chat template of {tokenizer.name_or_path!r} "
                "reads no variable of that name; leave it out"
            )


def _render(tokenizer: PreTrainedTokenizerBase, chat: str) -> str | Refused:
    given = json.loads(chat)
    settings = given.pop("chat_template_kwargs", {})
    try:
        text = tokenizer.apply_chat_template(
            **given, **settings, tokenize=False, add_generation_prompt=True
        )
        return text_of(text, blank=True)
    except Refused as refused:
        return refused
    except TEMPLATE_ERRORS as error:
        return Refused(f"the chat template refuses it ({type(error).__name__}: {error})")


def describe_prompts(tokenizer: PreTrainedTokenizerBase, rows: datasets.Dataset) -> str:
    """Describes inputs as `describe_inputs` does; of chats also the end of the first prompt, where
    the answer begins, so that a wrong template is seen."""
    found = describe_inputs(rows)
    if CHAT in rows.column_names:
        prompt = _render(tokenizer, rows[rows[REASON][:].index(None)][CHAT])
        if isinstance(prompt, str):
            return f"{found}; its answer begins after {prompt[-SHOWN:]!r}"
    return found


def say_reasons(reasons: Mapping[int, str]) -> None:
    """Prints one line per row with its reason, for at most ROWS_NAMED rows."""
    for row, reason in [*reasons.items()][:ROWS_NAMED]:
        say(f"  row {row}: {reason}")
    if len(reasons) > ROWS_NAMED:
        say(f"  and {len(reasons) - ROWS_NAMED} more")
