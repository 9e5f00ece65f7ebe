"""Rows of any data set -> rows of `row`, `source`, `reference`, for chats `messages`; -> tokens.

Which columns hold inputs and references is found by their usual names or told by the settings.
Chats are [{"role": ..., "content": ...}, ...]; an assistant's turn at the end is the reference,
what comes before it is the prompt. Rows with several questions (`turns`, as in Spec-Bench) give
the first.

Tokens: encoder-decoder targets get what their tokenizer makes of a text, end of sentence included.
Decoder-only targets go on with the prompt, so it keeps the tokens that the tokenizer puts before a
text (BOS) and loses those it puts after it (EOS). Chats are rendered with the tokenizer's template,
which writes all special tokens itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import DataConfig

INPUT_COLUMNS = ("source", "prompt", "text", "document")
REFERENCE_COLUMNS = ("reference", "target", "response", "summary", "canonical_solution")
CHATS = "messages"
"""Column of rows that are chats, in what is read and in what comes out."""
FILLED = "filled template"
"""Column of the texts made by `data.template`."""
TURNS = "turns"
"""Column of lists of questions."""
FEATURES = datasets.Features(
    row=datasets.Value("int64"),
    source=datasets.Value("string"),
    reference=datasets.Value("string"),
)
LISTS = (datasets.List, datasets.LargeList)
TURN = {"role": datasets.Value("string"), "content": datasets.Value("string")}


def as_inputs(
    rows: datasets.Dataset, numbers: Sequence[int], config: DataConfig
) -> datasets.Dataset:
    """The chosen columns of the numbered rows, renamed; prefix and suffix applied.

    Raises ConfigError for columns that are not there or hold something else.
    """
    if config.template is not None:
        rows = _fill_template(rows, config)
        config = config.model_copy(update={"input_column": FILLED, "template": None})
    column, reference_column = _choose_columns(rows, config)
    source_key, reference_key = config.source_language, config.target_language
    chats = _is_chat(rows.features[column])
    prefix, suffix = config.prefix, config.suffix

    def convert(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"row": [numbers[index] for index in indices]}
        if chats:
            prompts = [_split_chat(value) for value in batch[column]]
            wrapped = [_wrap_chat(chat, prefix, suffix) for chat, _ in prompts]
            found["source"], found[CHATS] = map(list, zip(*wrapped, strict=True))
            found["reference"] = [answer for _, answer in prompts]
        else:
            texts = [_text(value, source_key) or "" for value in batch[column]]
            found["source"] = [prefix + text + suffix for text in texts]
            found["reference"] = [None] * len(texts)
            if config.chat:
                found[CHATS] = [
                    [{"role": "user", "content": source}] if text.strip() else []
                    for text, source in zip(texts, found["source"], strict=True)
                ]
        if reference_column is not None:
            found["reference"] = [_text(value, reference_key) for value in batch[reference_column]]
        return found

    features = FEATURES
    if chats or config.chat:
        features = datasets.Features({**FEATURES, CHATS: datasets.List(TURN)})
    return rows.select(numbers).map(
        convert,
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names,
        features=features,
    )


def _fill_template(rows: datasets.Dataset, config: DataConfig) -> datasets.Dataset:
    """One more column, of texts made by the template. Raises ConfigError."""
    template = str(config.template)
    if config.input_column is not None:
        raise ConfigError(
            f"data.input_column = {config.input_column!r} and data.template are both given; leave "
            "one of the two out"
        )
    try:
        return rows.map(lambda row: {FILLED: template.format(**row)})
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"data.template = {template!r} does not fit the rows of {config.path!r} "
            f"({type(error).__name__}: {error}); name what every row has in braces, and double "
            f"braces that are text (the columns are: {', '.join(rows.column_names)})"
        ) from None


def _choose_columns(rows: datasets.Dataset, config: DataConfig) -> tuple[str, str | None]:
    """The columns of inputs and references. Raises ConfigError for none, and for what they hold."""
    translated = config.input_column is None and "translation" in rows.column_names
    languages = sorted(rows[0]["translation"]) if translated else []
    for field in ("source_language", "target_language"):
        value = getattr(config, field)
        if value not in (languages or [None]) and (value or field == "source_language"):
            raise ConfigError(
                f"data.{field} = {value!r}, but the translations in {config.path!r} are in "
                f"{', '.join(languages) or 'no column of that name'}; give one of these, or none"
            )
    if translated:
        return "translation", None if config.target_language is None else "translation"
    there, usual = ", ".join(rows.column_names), (CHATS, *INPUT_COLUMNS, TURNS)
    inputs = find_column(rows, config, "input_column", usual)
    if inputs is None:
        raise ConfigError(
            f"{config.path!r} has none of the columns {', '.join(usual)}; name the inputs with "
            f"data.input_column (there are: {there})"
        )
    references = find_column(rows, config, "reference_column", REFERENCE_COLUMNS)
    for field, column in (("input_column", inputs), ("reference_column", references)):
        kind = None if column is None else rows.features[column]
        listed = isinstance(kind, LISTS) and not isinstance(kind.feature, dict)
        chats = field == "input_column" and _is_chat(kind)
        if not (kind is None or isinstance(kind, datasets.Value) or listed or chats):
            raise ConfigError(
                f"column {column!r} of {config.path!r} holds {kind}, which is neither text nor "
                f'chats of {{"role", "content"}} turns; choose another with data.{field} (there '
                f"are: {there})"
            )
    return inputs, references


def find_column(
    rows: datasets.Dataset, config: DataConfig, field: str, defaults: Sequence[str]
) -> str | None:
    """The column that a setting names, or the first of the usual ones that is there. Raises
    ConfigError for a name that is no column."""
    named = getattr(config, field)
    if named is not None and named not in rows.column_names:
        there = ", ".join(rows.column_names)
        raise ConfigError(
            f"data.{field} = {named!r} is no column of {config.path!r}; give one of: {there}"
        )
    return named or next((name for name in defaults if name in rows.column_names), None)


def _is_chat(kind: Any) -> bool:
    """Whether a column holds lists of turns, each with a role and a content that are text."""
    if not isinstance(kind, LISTS) or not isinstance(kind.feature, dict):
        return False
    texts = [kind.feature.get(name) for name in TURN]
    return all(isinstance(text, datasets.Value) for text in texts)


def _split_chat(chat: list[dict[str, Any]] | None) -> tuple[list[dict[str, str]], str | None]:
    """The prompt, and the assistant's turn that ends the chat, if one does."""
    turns = [{name: turn[name] for name in TURN} for turn in chat or ()]
    if turns and turns[-1]["role"] == "assistant":
        return turns[:-1], turns[-1]["content"]
    return turns, None


def _wrap_chat(
    chat: list[dict[str, str]], prefix: str, suffix: str
) -> tuple[str, list[dict[str, str]]]:
    """The user's last turn, prefix and suffix applied, and the chat with it.

    Nothing of both where no turn is the user's, or a turn has no text.
    """
    users = [place for place, turn in enumerate(chat) if turn["role"] == "user"]
    whole = all(turn["role"] and (turn["content"] or "").strip() for turn in chat)
    if not users or not whole:
        return "", []
    text = prefix + chat[users[-1]]["content"] + suffix
    return text, [*chat[: users[-1]], {"role": "user", "content": text}, *chat[users[-1] + 1 :]]


def _text(value: Any, key: str | None) -> str | None:
    """Text of a cell: of a translation, the language's; of a list, the first; else none."""
    if isinstance(value, dict):
        value = value.get(key)
    if isinstance(value, list):
        value = value[0] if value else None
    # a column of mixed lists comes as JSON, in which the text "7" has become a number
    return None if value is None or isinstance(value, dict | list) else str(value)


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
    """The tokens of plain texts. Nothing is added to them but the tokenizer's special tokens; for
    decoder-only targets without those after the text, and none at all where there is no text."""
    if not texts:
        return []
    if not decoder_only:
        return tokenizer(list(texts), verbose=False)["input_ids"]
    encoded = tokenizer(list(texts), return_special_tokens_mask=True, verbose=False)
    ends = [
        max((place + 1 for place, special in enumerate(added) if not special), default=0)
        for added in encoded["special_tokens_mask"]
    ]
    return [ids[:end] for ids, end in zip(encoded["input_ids"], ends, strict=True)]


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


def _render(tokenizer: PreTrainedTokenizerBase, chat: Sequence[Mapping[str, str]], row: int) -> str:
    try:
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ConfigError(
            f"row {row}: the chat template of {tokenizer.name_or_path!r} refuses this chat "
            f"({error}); mend the row, or leave it out with data.skip or data.limit"
        ) from None
