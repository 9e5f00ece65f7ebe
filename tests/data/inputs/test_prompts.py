"""Inputs from all sources are read the same way, rows keep their numbers, errors are named."""

import gzip
import json
from pathlib import Path

import datasets
import pytest

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import DataConfig
from drafttrain.data.inputs.chats import Refused
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.inputs.rows import describe_inputs

ROWS = [
    {"source": "None", "reference": "a, b"},
    {"source": "", "reference": "NA"},
    {"source": 'two "words"', "reference": "zwei\u2028Wörter"},
    {"source": "x", "reference": "y"},
]


def load(path: Path, **settings) -> list[dict]:
    """Returns the rows, with `reason` only in unusable ones, and chats as lists of turns."""
    rows = load_inputs(DataConfig(path=str(path), **settings)).to_list()
    for row in rows:
        if row["reason"] is None:
            del row["reason"]
        if row.get("chat"):
            row["chat"] = json.loads(row["chat"])["conversation"]
    return rows


def write_lines(path: Path, *rows: object) -> Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def write(path: Path, content: str | bytes) -> Path:
    """Writes a text, compressed if the name ends with .gz, or bytes as they are."""
    if isinstance(content, str):
        content = content.encode(errors="surrogateescape")
        content = gzip.compress(content) if path.suffix == ".gz" else content
    path.write_bytes(content)
    return path


def write_rows(folder: Path, kind: str) -> Path:
    path, table = folder / f"data.{kind}", datasets.Dataset.from_list(ROWS)
    if kind.startswith("jsonl"):
        return write_lines(path, *ROWS)
    if kind.startswith("json"):
        return write(path, json.dumps(ROWS, indent=1))
    if kind.startswith("csv"):
        table.to_csv(str(path))
    else:
        table.to_parquet(str(path))
    if kind.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    return path


KINDS = ["json", "json.gz", "jsonl", "jsonl.gz", "parquet", "csv", "csv.gz"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, kind):
    expected = [{"row": number, **row} for number, row in enumerate(ROWS)]
    expected[1]["reason"] = "empty"
    assert load(write_rows(tmp_path, kind)) == expected


COLUMNS = '{"document": "d", "summary": "s", "title": "t", "id": 7}\n'
SET = {"input_column": "title", "reference_column": "id", "prefix": "Q: ", "suffix": " A:"}
CHOICES = '{"q": "One?", "c": ["a", "b"]}\n{"q": "Two?", "c": ["c", "d"]}\n'
TURNS = (
    '{"question_id": 81, "turns": ["a", "b"]}\n{"turns": ["c"], "reference": ["7"]}\n'
    '{"turns": ["d"], "reference": ["8"]}\n{"turns": ["e"], "reference": [{"aliases": ["f"]}]}\n'
)
"""Spec-Bench's rows: some have lists of references, which are not always text."""
LINES = "eins\n\ndrei\u2028vier\r\nfünf"
TEXTS = [("eins", None), ("", None), ("drei\u2028vier", None), ("fünf", None)]
CELLS = 'text,n\n007,1\n1.50,2\ntrue,3\nx,1,2\n"a\nb",4\n'
X = [("x", None)]
FOUND = {
    "lines": ("a.txt", LINES, {}, TEXTS),
    "compressed lines": ("a.txt.gz", LINES, {}, TEXTS),
    "lines of a language": ("train.en", LINES, {}, TEXTS),
    "usual columns": ("a.jsonl", COLUMNS, {}, [("d", "s")]),
    "set columns": ("a.jsonl", COLUMNS, SET, [("Q: t A:", "7")]),
    "a template": ("a.jsonl", CHOICES, {"template": "{q} ({c[1]})"}, [("One? (b)", None)]),
    "several turns": ("a.jsonl", TURNS, {}, [("a", None), ("c", "7"), ("d", "8"), ("e", None)]),
    "a name like a pattern": ("a[1].txt", "x\n", {}, X),
    "a list at first": ("a.jsonl", '{"text": [1, 2]}\n{"text": "x"}\n', {}, [("", None), *X]),
    "cells": ("a.csv", CELLS, {}, [(one, None) for one in ("007", "1.50", "true", "", "a\nb")]),
    "BOM of lines": ("a.txt", "\ufeffx\n", {}, X),
    "BOM of compressed lines": ("a.txt.gz", "\ufeffx\n", {}, X),
    "BOM of JSON lines": ("a.jsonl", '\ufeff{"text": "x"}\n', {}, X),
    "BOM of JSON": ("a.json", '\ufeff[{"text": "x"}]', {}, X),
    "BOM of a table": ("a.csv", "\ufefftext,n\nx,1\n", {}, X),
}


@pytest.mark.parametrize("kind", FOUND)
def test_inputs_and_references_are_found_in(tmp_path, kind):
    name, text, settings, expected = FOUND[kind]
    write(tmp_path / f"a1{Path(name).suffix}", "other")
    rows = load(write(tmp_path / name, text), **settings)
    assert [(row["source"], row["reference"]) for row in rows][: len(expected)] == expected


def test_line_aligned_files_give_inputs_and_references(tmp_path):
    sources = write(tmp_path / "train.en.gz", "a\nb\n\n")
    references = write(tmp_path / "train.de", "A\n\nC\n")
    rows = load(sources, reference_path=str(references))
    assert [(row["source"], row["reference"]) for row in rows] == [("a", "A"), ("b", ""), ("", "C")]
    write(tmp_path / "a.csv", "x\n1\n")
    write(tmp_path / "short.de", "A\nB\n")
    for name, message in (
        ("short.de", "3 lines.*has 2"),
        ("nowhere.de", "reference_path = .*nowhere.de' cannot be read"),
        ("a.csv", "for two files of plain text"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(sources, reference_path=str(tmp_path / name))


def test_saved_folders_and_folders_of_files_are_read(tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=table, test=table.select([3])).save_to_disk(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    table.to_parquet(str(tmp_path / "files" / "train.parquet"))
    assert load(tmp_path / "one") == load(tmp_path / "splits") == load(tmp_path / "files")
    assert load(tmp_path / "splits", split="test") == [{"row": 0, **ROWS[3]}]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "jsonl.gz"])
def test_rows_of_a_folder_are_read_one_by_one_as_those_of_a_file(tmp_path, kind):
    """Unreadable rows are counted, texts are unchanged, and other keys may hold anything."""
    bodies = {
        "jsonl": [
            '{"prompt": "007", "meta": 1}\n{"prompt": "b\n',
            '{"prompt": ["c"], "meta": {"z": [1]}}\n',
        ],
        "json": ['[{"prompt": "007", "meta": 1}, 7]', '{"prompt": "c", "meta": [{"q": 1}, 2]}'],
        "csv": ["prompt,meta\n007,1\nb\n", "prompt,meta\nc,x\n"],
    }[kind.removesuffix(".gz")]
    (tmp_path / "rows").mkdir()
    files = [write(tmp_path / f"rows/{number}.{kind}", body) for number, body in enumerate(bodies)]
    found = load(tmp_path / "rows")
    assert [(row["row"], row["source"]) for row in found] == [(0, "007"), (1, ""), (2, "c")]
    assert [row["source"] for file in files for row in load(file)] == ["007", "", "c"]
    latin = b"caf\xe9"
    files[1].write_bytes(gzip.compress(latin) if kind.endswith("gz") else latin)
    with pytest.raises(ConfigError, match=rf"rows/1.{kind}' .*not UTF-8"):
        load(tmp_path / "rows")


def test_splits_of_a_folder_are_recognised_by_file_names(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("train", "test"):
        write(folder / f"{name}.txt", f"{name}\n")
    assert [row["source"] for row in load(folder)] == ["train"]
    assert [row["source"] for row in load(folder, split="test")] == ["test"]
    with pytest.raises(ConfigError, match="data.split = 'other'"):
        load(folder, split="other")
    folder.rename(tmp_path / "row[s]")
    (tmp_path / "rows").mkdir()
    with pytest.raises(ConfigError, match=r"row\[s\]'.*rename it"):
        load(tmp_path / "row[s]")


def test_skip_and_limit_keep_the_original_numbers(tmp_path):
    assert load(write_rows(tmp_path, "jsonl"), skip=2, limit=1) == [{"row": 2, **ROWS[2]}]
    assert [row["row"] for row in load(write_rows(tmp_path, "csv"), skip=1, limit=99)] == [1, 2, 3]


def test_fields_of_columns_are_taken_by_name(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"translation": {"en": "house", "de": "Haus"}}\n')
    chosen = {"input_column": "translation.de", "reference_column": "translation.en"}
    found = [{"row": 0, "source": "Haus", "reference": "house"}]
    assert load(path, **chosen) == found
    text = datasets.Value("string")
    for feature in (datasets.Translation(["de", "en"]), {"de": text, "en": text}):
        features = datasets.Features(translation=feature, other=text)
        rows = [{"translation": {"en": "house", "de": "Haus"}, "other": "o"}]
        saved = datasets.Dataset.from_list(rows, features=features)
        saved.save_to_disk(tmp_path / type(feature).__name__)
        assert load(tmp_path / type(feature).__name__, **chosen) == found
    for name in ("input_column", "reference_column"):
        with pytest.raises(ConfigError, match=rf"{name} = 'translation.fr'.* translation.en"):
            load(path, **chosen | {name: "translation.fr"})
    with pytest.raises(ConfigError, match=r"data.input_column .*translation.en, translation.de"):
        load(path)


CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2"},
]


def test_rows_that_another_version_converted_are_not_reused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", "x\n\n")
    assert load(path)[1]["reason"] == "empty"
    monkeypatch.setattr(Refused, "__init__", lambda self, reason: setattr(self, "reason", "new"))
    assert load(path)[1]["reason"] == "new"


def test_of_a_chat_the_assistants_last_turn_is_the_reference(tmp_path):
    lines = [{"messages": chat} for chat in (CHAT, CHAT[:4], CHAT[:2])]
    path = write_lines(tmp_path / "a.jsonl", *lines)
    rows = load(path)
    assert [row["source"] for row in rows] == ["two?", "two?", "one?"]
    assert [row["reference"] for row in rows] == ["2", None, None]
    assert [row["chat"] for row in rows] == [CHAT[:4], CHAT[:4], CHAT[:2]]
    [wrapped] = load(path, prefix="Q: ", suffix=" A:", limit=1)
    assert (wrapped["source"], wrapped["reference"]) == ("Q: two? A:", "2")
    assert wrapped["chat"] == [*CHAT[:3], {"role": "user", "content": "Q: two? A:"}]


def test_a_chat_may_lie_in_a_column_of_any_name_or_be_made_of_a_text(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"talk": CHAT, "text": "x"}, {"talk": [], "text": ""})
    assert load(path, input_column="talk")[0]["chat"] == CHAT[:4]
    assert "chat" not in load(path)[0]
    rows = load(path, chat=True, suffix="?")
    assert [row["chat"] for row in rows] == [[{"role": "user", "content": "x?"}], None]


def test_chats_without_user_text_are_skipped_rows(tmp_path):
    silent = [CHAT[0], {"role": "user", "content": None}]
    chats = ([CHAT[0], CHAT[2]], silent, [], CHAT)
    path = write_lines(tmp_path / "a.jsonl", *({"messages": chat} for chat in chats))
    rows = load(path, prefix="Q: ")
    assert [(row["source"], row["chat"]) for row in rows[:3]] == [("", None)] * 3
    assert {row["reason"] for row in rows[:3]} == {"no user turn, or one without text"}
    assert rows[3]["chat"][-1]["content"] == "Q: two?"


CUT = gzip.compress(b"many words\n" * 100)[:30]
MISTAKES = {
    "no gzip": ("a.txt.gz", b"plain\n", {}, r"cannot be read as"),
    "cut gzip": ("a.txt.gz", CUT, {}, r"cannot be read as"),
    "unfit template": ("a.jsonl", '{"c": 1}\n', {"template": "{d}"}, r"none of the 1 rows.*'{d}'"),
    "missing": ("nowhere.jsonl", None, {}, r"no such file"),
    "empty": ("a.txt", "", {}, r"holds no rows"),
    "unknown column": ("a.csv", "text,n\nx,1\n", {"input_column": "txt"}, r"'txt'.*text, n"),
    "no json at all": ("a.jsonl", "prompt: x\ny\n", {}, r"no row of .*a.jsonl.*no JSON"),
    "no text at all": ("a.jsonl", '{"text": 7}\n{"text": null}\n', {}, r"none of the 2 r.*'text'"),
    "two inputs": ("a.jsonl", '{"prompt": "x", "source": "web"}\n', {}, r"input_column=prompt"),
    "a column twice": ("a.csv", "text,n,text\nx,1,y\n", {}, r"a.csv' .*2 columns .*'text'"),
    "two inputs, a table": ("a.csv", "text,document\nx,y\n", {}, r"'text' and 'document'"),
    "chat and prompt": ("a.jsonl", '{"prompt": "x", "messages": []}\n', {}, r"'messages' and 'pro"),
    "a rival": ("a.jsonl", '{"question": "x", "source": "web"}\n', {}, r"column=question"),
    "two references": (
        "a.jsonl",
        '{"text": "x", "target": "y", "summary": "z"}\n',
        {},
        r"'target' and 'summary'.*data.reference_column=summary",
    ),
    "settings of chats": ("a.txt", "x\n", {"chat_template_kwargs": {"x": 1}}, r"data.chat=true"),
    "Latin-1": ("a.txt", "caf\udce9\n", {}, r"a.txt' .*not UTF-8"),
    "configuration of a file": ("a.txt", "x\n", {"config_name": "de-en"}, r"config_name.*remove"),
    "split of a file": ("a.txt", "x\n", {"split": "test"}, r"nknown split .test"),
}


LINES_OF_JSON = ['{"prompt": "a"}', '{"prompt": "b', "[1, 2]", '{"prompt": 7}', '{"other": "c"}']
LINES_OF_JSON += ['{"prompt": "\\ud800"}', '{"prompt": {"a": 1}}', '{"prompt": ["d", "e"]}']
UNREADABLE = ["no JSON", "not an object", "7, not a text", "empty", "surrogate", "dict"]
UNREADABLE += ["list of 2"]
UNFIT = ['{"c": ["x", "y"]}', '{"c": ["x"]}', '{"c": null}']


@pytest.mark.parametrize(
    ("lines", "settings", "reasons"),
    [(LINES_OF_JSON, {}, UNREADABLE), (UNFIT, {"template": "{c[1]}"}, ["IndexError", "KeyError"])],
    ids=["unreadable", "not fit for the template"],
)
def test_a_row_that_cannot_be_used_is_counted_and_the_others_stay(
    tmp_path, lines, settings, reasons
):
    rows = load(write(tmp_path / "a.jsonl", "\n".join(lines)), **settings)
    assert "reason" not in rows[0]
    for row, reason in zip(rows[1:], reasons, strict=True):
        assert reason in row["reason"]


def test_inputs_are_described_by_their_columns_and_the_first_of_them(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": None}, {"prompt": "one two", "target": "y"})
    line = describe_inputs(load_inputs(DataConfig(path=str(path))))
    assert "'prompt'" in line and "'target'" in line and "one two" in line
    assert line.startswith("2 inputs of")
    assert describe_inputs(load_inputs(DataConfig(path=str(path), skip=1))).startswith("1 input of")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_error_that_names_it(tmp_path, mistake):
    name, text, settings, message = MISTAKES[mistake]
    if text is not None:
        write(tmp_path / name, text)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / name, **settings)


CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_turns_keep_the_fields_of_templates(tmp_path):
    """Optional keys, tool calls with arguments as objects, reasoning, content parts, ShareGPT."""
    wanted, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    chats = [
        [{**wanted, "name": "bob"}, answer],
        [wanted, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "1"}],
        [wanted, {**answer, "reasoning_content": "r"}, wanted],
        [{"role": "user", "content": [{"type": "text", "text": "q"}, "more"]}],
        [{"from": who, "value": who[0]} for who in ("system", "human", "gpt")],
        [{"role": "user", "content": [{"type": "image"}]}],
    ]
    rows = load(write_lines(tmp_path / "a.jsonl", *({"messages": chat} for chat in chats)))
    assert rows[0]["chat"] == [{**wanted, "name": "bob"}] and rows[0]["reference"] == "a"
    call = rows[1]["chat"][1]
    assert call["tool_calls"][0]["function"]["arguments"] == {"a": 1} and call["content"] == ""
    assert rows[2]["chat"][1]["reasoning_content"] == "r"
    assert rows[3]["source"] == "q\nmore"
    assert rows[4]["chat"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "h"}]
    assert rows[4]["reference"] == "g" and "image" in rows[5]["reason"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_tools_and_settings_of_a_row_go_to_the_template(tmp_path, kind):
    tools = [{"type": "function", "function": {"name": "add"}}]
    wanted = [{"role": "user", "content": "q"}]
    rows = [
        {"conversations": wanted, "tools": tools, "chat_template_kwargs": {"thinking": False}},
        {"conversations": wanted, "tools": None, "chat_template_kwargs": None},
    ]
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    else:
        write_lines(path, *rows, {"conversations": wanted, "tools": json.dumps(tools)})
    config = DataConfig(path=str(path), chat_template_kwargs={"thinking": True, "deep": 1})
    first, second, *others = map(json.loads, load_inputs(config)["chat"][:])
    assert first["tools"] == tools and "tools" not in second
    assert first["chat_template_kwargs"] == {"thinking": False, "deep": 1}
    assert second["chat_template_kwargs"] == {"thinking": True, "deep": 1}
    assert all(one["tools"] == tools for one in others)
