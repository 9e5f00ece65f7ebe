"""Conversion of data set rows to `row`, `source`, `reference`, `reason`, and `chat` for chats.

The columns with inputs and references are set by the user or found by their usual names. Each cell
is read individually, as a text or a chat; if that fails, `reason` states why the row is unusable.
For rows with several questions (`turns`, as in Spec-Bench) the first one is used.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import datasets

from drafttrain.config.base import ConfigError, counted
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
"""Columns that may also have the inputs; with one of `INPUT_COLUMNS` the choice is ambiguous."""
REFERENCE_COLUMNS = ("reference", "target", "response", "summary", "canonical_solution")
LINE = "line of json"
"""The only column of rows that are lines of JSON, parsed one at a time."""
SHOWN = 72
"""Number of characters of the first input that are printed."""
REASON = "reason"
"""Column with the reason why a row is unusable; None if it is usable."""
FEATURES = datasets.Features(
    row=datasets.Value("int64"),
    source=datasets.Value("string"),
    reference=datasets.Value("string"),
    reason=datasets.Value("string"),
)


class Columns(NamedTuple):
    """The input and reference columns of a data set."""

    input: str
    reference: str | None
    named: str
    """Description of the columns in messages."""


def read_rows(batch: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any] | Refused]:
    """Yields the rows of a batch of columns as dicts by column name; parses lines of JSON."""
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
        return Refused(f"{found!r:.72}, not an object with columns by name")
    return found


def _without_none(value: Any) -> Any:
    """Removes the None values that Arrow adds to objects for keys of other rows."""
    if isinstance(value, dict):
        return {k: _without_none(own) for k, own in value.items() if own is not None}
    return list(map(_without_none, value)) if isinstance(value, list) else value


def iterate_rows(rows: datasets.Dataset) -> Iterator[dict[str, Any] | Refused]:
    """Yields all rows in order, with one batch in memory at a time."""
    for batch in rows.iter(batch_size=1000):
        yield from read_rows(batch)


def column_names(rows: datasets.Dataset, path: str) -> list[str]:
    """Returns column names; of lines of JSON, all keys. Raises ConfigError if there are none."""
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
    """Yields column names and the fields of their objects: translation, translation.en, ..."""
    for name, held in columns.items():
        yield name
        fields = held.flatten() if isinstance(held, datasets.Translation) else held
        if isinstance(fields, dict):
            yield from (f"{name}.{field}" for field in fields)


def cell_of(row: Mapping[str, Any], column: str | None) -> Any:
    """Returns a row's value in a column or in a field of it (`name.field`); None if missing."""
    if column is None or column in row:
        return row.get(column)
    name, _, field = column.partition(".")
    held = row.get(name)
    return held.get(field) if isinstance(held, dict) else None


def as_inputs(
    rows: datasets.Dataset, numbers: Sequence[int], config: DataConfig
) -> datasets.Dataset:
    """Converts the numbered rows to inputs, with prefix and suffix applied. Raises ConfigError for
    missing or ambiguous columns, and chat settings without chats."""
    rows = rows.select(numbers)
    columns = _choose_columns(rows, config)
    if LINE not in rows.column_names and config.template is None:
        needed = {columns.input, columns.reference or "", *CHAT_SETTINGS}
        needed |= {name.partition(".")[0] for name in needed}
        rows = rows.select_columns([name for name in rows.column_names if name in needed])
    chats = config.chat or (config.template is None and is_chat(_first_cell(rows, columns, config)))
    if config.chat_template_kwargs and not chats:
        raise ConfigError(
            f"data.chat_template_kwargs = {config.chat_template_kwargs} has no effect, because "
            f"{columns.named} holds texts; remove it, or add data.chat=true"
        )
    features = datasets.Features(FEATURES | ({CHAT: datasets.Value("string")} if chats else {}))

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
        load_from_cache_file=False,  # a result in the cache could be another version's
    )
    inputs.info.description = columns.named
    return inputs


def _first_cell(rows: datasets.Dataset, columns: Columns, config: DataConfig) -> Any:
    """Returns the first input value that is not empty."""
    for row in iterate_rows(rows):
        with suppress(Refused):
            if isinstance(row, dict) and (cell := read_cell(row, columns, config)):
                return cell
    return None


def read_cell(row: dict[str, Any], columns: Columns, config: DataConfig) -> Any:
    """Returns a row's input value; parses chats that are JSON text. Raises Refused if the template
    does not fit the row, and for a list of several values that is not a chat."""
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
    """Returns the columns of one input: `source`, `reference`, `chat`, or `reason` if unusable."""
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
            return chat | {"reference": found.get("reference", chat["reference"])}
        if is_chat(cell):
            raise Refused("turns of a chat, where others are texts")
        return found | {"source": config.prefix + text_of(cell) + config.suffix}
    except Refused as refused:
        return found | {REASON: refused.reason}


def _fill(template: str, row: Mapping[str, Any]) -> str:
    """Fills the template with a row's values. Raises Refused if they do not fit."""
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
    """Finds the input and reference columns. Raises ConfigError for none or several candidates."""
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
    """Returns the column that a setting names, else the one with a usual name, else None. Raises
    ConfigError for an unknown column, and if several columns match."""
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
    """Selects the usable rows of `load_inputs`: those without a reason."""
    return rows.select([i for i, reason in enumerate(rows[REASON][:]) if reason is None])


def describe_inputs(rows: datasets.Dataset) -> str:
    """Describes inputs: their number, columns, and the start of the first usable source."""
    text = " ".join(rows[rows[REASON][:].index(None)]["source"].split())
    shown = text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
    return f"{counted(len(rows), 'input')} of {rows.info.description}, the first: {shown!r}"
