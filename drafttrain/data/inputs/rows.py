"""Rows of any data set -> rows of `row`, `source`, `reference`, `reason`, for chats `chat`.

Which columns hold inputs and references is found by their usual names or told by the settings. Each
cell is read by itself: what it holds makes a text, a chat, or `reason`, why the row cannot be used.
Rows with several questions (`turns`, as in Spec-Bench) give the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import DataConfig
from drafttrain.data.inputs.chats import (
    CHAT,
    CHAT_SETTINGS,
    Refused,
    from_json,
    is_chat,
    read_chat,
    reference_of,
    text_of,
)

CHAT_COLUMNS = ("messages", "conversations", "conversation")
INPUT_COLUMNS = (*CHAT_COLUMNS, "source", "prompt", "text", "document", "turns")
RIVALS = ("question", "instruction", "input", "query", "article", "content")
"""Columns that may hold the inputs as well: one of them beside a usual one leaves it open."""
REFERENCE_COLUMNS = ("reference", "target", "response", "summary", "canonical_solution")
LINE = "line of json"
"""The only column of rows that are read from lines of JSON, one at a time."""
REASON = "reason"
"""Column that says why a row cannot be used; None where it can."""
FEATURES = datasets.Features(
    row=datasets.Value("int64"),
    source=datasets.Value("string"),
    reference=datasets.Value("string"),
    reason=datasets.Value("string"),
)


@dataclass(frozen=True)
class Columns:
    """The columns of a data set that are read."""

    input: str
    reference: str | None
    named: str
    """What they are called in messages."""


def read_rows(batch: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any] | Refused]:
    """The rows of a batch of columns, by the columns' names; of lines of JSON, what each holds."""
    if LINE in batch:
        yield from map(_parse_line, batch[LINE])
        return
    for values in zip(*batch.values(), strict=True):
        yield {name: _without_none(value) for name, value in zip(batch, values, strict=True)}


def _parse_line(line: str) -> dict[str, Any] | Refused:
    try:
        found = json.loads(line.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        return Refused(f"no JSON ({error})")
    if isinstance(found, str):
        return {"text": found}
    if not isinstance(found, dict):
        return Refused(f"{shortened(repr(found))}, not an object with columns by name")
    return found


def _without_none(value: Any) -> Any:
    """What Arrow adds where rows have different keys is taken out again."""
    if isinstance(value, dict):
        return {k: _without_none(own) for k, own in value.items() if own is not None}
    return list(map(_without_none, value)) if isinstance(value, list) else value


def shortened(text: str, most: int = 72) -> str:
    """A text on one line, as far as it fits."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def iterate_rows(rows: datasets.Dataset) -> Iterator[dict[str, Any] | Refused]:
    """All rows in order, a batch in memory at a time."""
    for batch in rows.iter(batch_size=1000):
        yield from read_rows(batch)


def column_names(rows: datasets.Dataset, path: str) -> list[str]:
    """Of lines of JSON those of all objects. Raises ConfigError where no line holds one."""
    if LINE not in rows.column_names:
        return list(_names(rows.features))
    read = (row for row in iterate_rows(rows) if isinstance(row, dict))
    names = dict.fromkeys(name for row in read for name in _names(row))
    if not names:
        first = next(iterate_rows(rows))
        reason = first.reason if isinstance(first, Refused) else "no columns"
        raise ConfigError(
            f"no row of {path!r} holds columns by name (row 0: {reason}); give lines of JSON "
            "objects, or another kind of file by its suffix"
        )
    return list(names)


def _names(columns: Mapping[str, Any]) -> Iterator[str]:
    """Columns, each with the fields of the objects in it: translation, translation.en, ..."""
    for name, held in columns.items():
        yield name
        fields = held.flatten() if isinstance(held, datasets.Translation) else held
        if isinstance(fields, dict):
            yield from (f"{name}.{field}" for field in fields)


def cell_of(row: Mapping[str, Any], column: str | None) -> Any:
    """What a row has in a column, or in a field of it; None where it has nothing."""
    if column is None or column in row:
        return row.get(column)
    name, _, field = column.partition(".")
    held = row.get(name)
    return held.get(field) if isinstance(held, dict) else None


def as_inputs(
    rows: datasets.Dataset, numbers: Sequence[int], config: DataConfig
) -> datasets.Dataset:
    """The chosen columns of the numbered rows, renamed; prefix and suffix applied.

    Raises ConfigError for columns that are not there.
    """
    rows = rows.select(numbers)
    columns = _choose_columns(rows, config)
    if LINE not in rows.column_names and config.template is None:
        needed = {columns.input, columns.reference or "", *CHAT_SETTINGS}
        needed |= {name.partition(".")[0] for name in needed}
        rows = rows.select_columns([name for name in rows.column_names if name in needed])
    readable = (row for row in iterate_rows(rows) if not isinstance(row, Refused))
    cells = (read_cell(row, columns, config) for row in readable)
    texts = config.template is not None
    chats = config.chat or (not texts and is_chat(next(filter(None, cells), None)))
    if config.chat_template_kwargs and not chats:
        raise ConfigError(
            f"data.chat_template_kwargs = {config.chat_template_kwargs} counts for chats only, but "
            f"{columns.named} holds texts; leave it out, or add data.chat=true"
        )
    features = datasets.Features(
        {**FEATURES, **({CHAT: datasets.Value("string")} if chats else {})}
    )

    def convert(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        found = [as_input(row, columns, config, chats) for row in read_rows(batch)]
        read = {name: [row.get(name) for row in found] for name in features}
        return read | {"row": [numbers[index] for index in indices]}

    inputs = rows.map(
        convert,
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names,
        features=features,
    )
    inputs.info.description = columns.named
    return inputs


def read_cell(row: dict[str, Any], columns: Columns, config: DataConfig) -> Any:
    """What is read of a row as its input; a chat may be JSON in a text. Raises Refused for a row
    that the template does not fit, and for a list of texts that are no turns."""
    if config.template is not None:
        return _fill(config.template, row)
    value = cell_of(row, columns.input)
    if columns.input in CHAT_COLUMNS and isinstance(found := from_json(value), list):
        return found
    if isinstance(value, list) and not is_chat(value):
        if len(value) > 1 and columns.input != "turns":
            raise Refused(
                f"a list of {len(value)}, not a text; give data.input_column, or one of them as "
                f"data.template={{{columns.input}[0]}}"
            )
        return value[0] if value else None
    return value


def as_input(
    row: dict[str, Any] | Refused, columns: Columns, config: DataConfig, chats: bool
) -> dict[str, Any]:
    """The columns of one input: `source`, `reference`, `chat`, or why it cannot be used."""
    found: dict[str, Any] = {"source": ""}
    try:
        if isinstance(row, Refused):
            raise row
        if columns.reference is not None:
            found["reference"] = reference_of(cell_of(row, columns.reference))
        cell = read_cell(row, columns, config)
        if config.chat and not is_chat(cell):
            cell = [{"role": "user", "content": text_of(cell)}]
        if chats:
            chat = read_chat(cell, row, config)
            return {"reference": chat.answer} | found | {"source": chat.source, CHAT: chat.template}
        if is_chat(cell):
            raise Refused("turns of a chat, where others are texts")
        return found | {"source": config.prefix + text_of(cell) + config.suffix}
    except Refused as refused:
        return found | {REASON: refused.reason}


def _fill(template: str, row: Mapping[str, Any]) -> str:
    """The template with a row's values in it."""
    there = {name: value for name, value in row.items() if value is not None}
    try:
        return template.format(**there)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise Refused(
            f"data.template = {template!r} does not fit it ({type(error).__name__}: {error}); name "
            "in braces what every row has, and double braces that are text; there are: "
            + ", ".join(there)
        ) from None


def _choose_columns(rows: datasets.Dataset, config: DataConfig) -> Columns:
    """The columns of inputs and references. Raises ConfigError for none, and for several."""
    names = column_names(rows, config.path)
    references = find_column(names, config, "reference_column", REFERENCE_COLUMNS)
    if config.template is not None:
        if config.input_column is not None:
            raise ConfigError(
                f"data.input_column = {config.input_column!r} and data.template are both given; "
                "leave one of the two out"
            )
        return Columns("", references, f"template {config.template!r}")
    inputs = find_column(names, config, "input_column", INPUT_COLUMNS, RIVALS)
    if inputs is None:
        raise ConfigError(
            f"{config.path!r} has none of the columns {', '.join(INPUT_COLUMNS)}; name the inputs "
            f"with data.input_column (there are: {', '.join(names)})"
        )
    named = f"column {inputs!r}"
    if references is not None:
        named += f" with references {references!r}"
    return Columns(inputs, references, named)


def find_column(
    names: Sequence[str],
    config: DataConfig,
    field: str,
    usual: Sequence[str],
    rivals: Iterable[str] = (),
) -> str | None:
    """The column that a setting names, or the one of the usual names that is there. Raises
    ConfigError for a name that is no column, and where there are two."""
    named, there = getattr(config, field), ", ".join(names)
    if named is not None:
        if named not in names:
            raise ConfigError(
                f"data.{field} = {named!r} is no column of {config.path!r}; give one of: {there}"
            )
        return named
    found = [name for name in usual if name in names]
    others = [name for name in rivals if name in names]
    if found and len(found) + len(others) > 1:
        both = [*found, *others]
        raise ConfigError(
            f"{config.path!r} has the columns {' and '.join(map(repr, both))}, and each may hold "
            f"the {field.partition('_')[0]}s; say which: "
            f"{' or '.join(f'data.{field}={one}' for one in both)}"
        )
    return found[0] if found else None


def usable(rows: datasets.Dataset) -> datasets.Dataset:
    """The rows of `load_inputs` that have no reason against them."""
    return rows.select([i for i, reason in enumerate(rows[REASON][:]) if reason is None])


def check_some(rows: datasets.Dataset, path: str) -> None:
    """Raises ConfigError where no row can be used."""
    reasons = rows[REASON][:]
    if None not in reasons:
        raise ConfigError(
            f"none of the {len(rows)} rows of {path!r} ({rows.info.description}) can be used; row "
            f"{rows[0]['row']}: {reasons[0]}; give data with at least one, or another column"
        )


def describe_inputs(rows: datasets.Dataset) -> str:
    """The columns that inputs were read from, and the first one that can be used, shortened."""
    first = rows[rows[REASON][:].index(None)]["source"]
    return f"{len(rows):,} inputs of {rows.info.description}, the first: {shortened(first)!r}"
