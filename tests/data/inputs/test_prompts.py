"""Inputs are read alike from every place, rows keep their numbers, mistakes are named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import pytest

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import DataConfig
from drafttrain.data.inputs.prompts import load_inputs

ROWS = [
    {"source": "None", "reference": "a, b"},
    {"source": "", "reference": "NA"},
    {"source": 'two "words"', "reference": "zwei\u2028Wörter"},
    {"source": "x", "reference": "y"},
]


def load(path: Path, **settings) -> list[dict]:
    return load_inputs(DataConfig(path=str(path), **settings)).to_list()


def write(path: Path, text: str) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def write_rows(folder: Path, kind: str) -> Path:
    path, table = folder / f"data.{kind}", datasets.Dataset.from_list(ROWS)
    if kind.startswith("jsonl"):
        return write(path, "".join(json.dumps(row) + "\n" for row in ROWS))
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
    assert load(write_rows(tmp_path, kind)) == expected


@pytest.mark.parametrize("name", ["lines.txt", "lines.txt.gz", "train.en", "train.en.gz"])
def test_a_line_of_text_is_a_row(tmp_path, name):
    rows = load(write(tmp_path / name, "eins\n\ndrei\u2028vier\r\nfünf"))
    assert [row["source"] for row in rows] == ["eins", "", "drei\u2028vier", "fünf"]
    assert {row["reference"] for row in rows} == {None}


def test_line_aligned_files_give_inputs_and_references(tmp_path):
    sources = write(tmp_path / "train.en.gz", "a\nb\n\n")
    references = write(tmp_path / "train.de", "A\n\nC\n")
    rows = load(sources, reference_path=str(references))
    assert [(row["source"], row["reference"]) for row in rows] == [("a", "A"), ("b", ""), ("", "C")]


def test_saved_folders_and_folders_of_files_are_read(tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=table, test=table.select([3])).save_to_disk(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    table.to_parquet(str(tmp_path / "files" / "train.parquet"))
    assert load(tmp_path / "one") == load(tmp_path / "splits") == load(tmp_path / "files")
    assert load(tmp_path / "splits", split="test") == [{"row": 0, **ROWS[3]}]


def test_skip_and_limit_keep_the_original_numbers(tmp_path):
    rows = load(write_rows(tmp_path, "jsonl"), skip=2, limit=1)
    assert rows == [{"row": 2, **ROWS[2]}]
    assert [row["row"] for row in load(write_rows(tmp_path, "csv"), skip=1, limit=99)] == [1, 2, 3]


def test_columns_are_found_by_their_usual_names_or_as_told(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"document": "d", "summary": "s", "title": "t", "id": 7}\n')
    assert load(path) == [{"row": 0, "source": "d", "reference": "s"}]
    chosen = load(path, input_column="title", reference_column="id")
    assert chosen == [{"row": 0, "source": "t", "reference": "7"}]


def test_translations_are_taken_by_language(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"translation": {"en": "house", "de": "Haus"}}\n')
    assert load(path, source_language="de", target_language="en") == [
        {"row": 0, "source": "Haus", "reference": "house"}
    ]
    assert load(path, source_language="en")[0]["reference"] is None
    with pytest.raises(ConfigError, match=r"source_language = 'fr'.* de, en"):
        load(path, source_language="fr")
    with pytest.raises(ConfigError, match=r"source_language = None.* de, en"):
        load(path)


def test_a_template_makes_inputs_of_several_columns(tmp_path):
    rows = [
        {"question": "One?", "choices": ["a", "b"]},
        {"question": "Two?", "choices": ["c", "d"]},
    ]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    template = "{question} (A) {choices[0]} (B) {choices[1]}"
    found = load(path, template=template, prefix="Q: ", skip=1)
    assert [(row["row"], row["source"]) for row in found] == [(1, "Q: Two? (A) c (B) d")]


def test_prefix_and_suffix_go_around_every_input(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "x", "answer": "y"}\n')
    settings = {"prefix": "Question: ", "suffix": "\nAnswer:", "reference_column": "answer"}
    assert load(path, **settings) == [
        {"row": 0, "source": "Question: x\nAnswer:", "reference": "y"}
    ]


CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2"},
]


def test_of_a_chat_the_assistants_last_turn_is_the_reference(tmp_path):
    lines = [{"messages": chat} for chat in (CHAT, CHAT[:4], CHAT[:2])]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    rows = load(path)
    assert [row["source"] for row in rows] == ["two?", "two?", "one?"]
    assert [row["reference"] for row in rows] == ["2", None, None]
    assert [row["messages"] for row in rows] == [CHAT[:4], CHAT[:4], CHAT[:2]]
    wrapped = load(path, prefix="Q: ", suffix=" A:", limit=1)[0]
    asked = {"role": "user", "content": "Q: two? A:"}
    assert wrapped == {
        "row": 0,
        "source": "Q: two? A:",
        "reference": "2",
        "messages": [*CHAT[:3], asked],
    }


def test_a_chat_may_lie_in_a_column_of_any_name(tmp_path):
    path = write(tmp_path / "a.jsonl", json.dumps({"talk": CHAT, "text": "x"}) + "\n")
    assert load(path, input_column="talk")[0]["messages"] == CHAT[:4]
    assert "messages" not in load(path)[0]


def test_chats_without_a_users_text_keep_their_rows_and_hold_nothing(tmp_path):
    nobody = [CHAT[0], CHAT[2]]
    silent = [CHAT[0], {"role": "user", "content": None}]
    lines = [{"messages": chat} for chat in (nobody, silent, [], CHAT)]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    rows = load(path, prefix="Q: ")
    assert [(row["source"], row["messages"]) for row in rows[:3]] == [("", [])] * 3
    assert rows[3]["messages"][-1]["content"] == "Q: two?"


def test_a_text_becomes_a_users_message_where_asked(tmp_path):
    path = write(tmp_path / "a.txt", "one\n\n")
    rows = load(path, chat=True, suffix="?")
    assert [row["messages"] for row in rows] == [[{"role": "user", "content": "one?"}], []]


def test_of_several_turns_the_first_is_the_prompt(tmp_path):
    """Spec-Bench's rows: some have references, in lists, and not all of these are text."""
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"question_id": 82, "category": "math", "turns": ["c"], "reference": ["7"]},
        {"question_id": 83, "category": "math", "turns": ["d"], "reference": ["8"]},
        {"question_id": 84, "category": "qa", "turns": ["e"], "reference": [{"aliases": ["f"]}]},
    ]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    rows = load(path)
    assert [(row["source"], row["reference"]) for row in rows] == [
        ("a", None),
        ("c", "7"),
        ("d", "8"),
        ("e", None),
    ]


MISTAKES = {
    "missing": ("nowhere.jsonl", None, {}, r"no such file"),
    "empty": ("a.txt", "", {}, r"cannot be read|holds no rows"),
    "unknown column": ("a.csv", "text,n\nx,1\n", {"input_column": "txt"}, r"'txt'.*text, n"),
    "broken json": (
        "a.jsonl",
        '{"text": "x"}\n{"text": "y"\n',
        {},
        r"cannot be read as json: JSON parse error: Miss.* row 1",
    ),
    "other chat": (
        "a.jsonl",
        '{"messages": [{"from": "human", "value": "x"}]}\n',
        {},
        r"'messages'.*nor chats of .\"role\", \"content\". turns",
    ),
    "template beyond a list": (
        "a.jsonl",
        '{"c": ["x", "y"]}\n{"c": ["x"]}\n',
        {"template": "{c[1]}"},
        r"does not fit the rows",
    ),
    "split of a file": ("a.txt", "x\n", {"split": "test"}, r"Unknown split .test"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_error_that_names_it(tmp_path, mistake):
    name, text, settings, message = MISTAKES[mistake]
    if text is not None:
        write(tmp_path / name, text)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / name, **settings)


def test_a_file_that_is_no_text_or_no_sound_gzip_is_refused(tmp_path):
    pickled = tmp_path / "a.pkl"
    pickled.write_bytes(b"\x80\x04\x95")
    fake = tmp_path / "fake.txt.gz"
    fake.write_text("plain\n")
    cut = tmp_path / "cut.txt.gz"
    cut.write_bytes(gzip.compress(b"many words\n" * 100)[:30])
    for path in (fake, cut, pickled):
        with pytest.raises(ConfigError, match="cannot be read as text"):
            load(path)


def test_files_that_are_not_aligned_are_refused_with_both_counts(tmp_path):
    sources, references = write(tmp_path / "a.en", "1\n2\n3\n"), write(tmp_path / "a.de", "1\n2\n")
    with pytest.raises(ConfigError, match=r"3 lines.*has 2"):
        load(sources, reference_path=str(references))
    with pytest.raises(ConfigError, match="reference_path = .*nowhere.de' cannot be read"):
        load(sources, reference_path=str(tmp_path / "nowhere.de"))
    with pytest.raises(ConfigError, match="for two files of plain text"):
        load(sources, reference_path=str(write(tmp_path / "a.csv", "x\n1\n")))
