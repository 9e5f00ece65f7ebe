"""Makes the embedded data set: sentences of the standard library, casing and punctuation removed.

    python data/make_docstrings.py            # writes data/docstrings/{train,val,test}.jsonl.gz
    python data/make_docstrings.py --check    # checks that the committed files are reproduced

Task: restore casing and punctuation. A row is {"source": ..., "reference": ...}; the reference is a
sentence from a docstring or a comment of CPython's standard library, the source is the same after
`strip_casing_and_punctuation`. The files are reproducible byte for byte with the same patch release
of CPython (`PYTHON_VERSION`); data/README.md has the details. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import inspect
import io
import json
import platform
import re
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

PYTHON_VERSION = "3.11.7"
OUT = Path(__file__).resolve().parent / "docstrings"
VAL_ROWS = 500
TEST_ROWS = 500

SKIPPED_FOLDERS = {"site-packages", "ensurepip", "turtledemo", "test", "tests", "idle_test"}
"""Folders of other packages, of demos and of tests."""

OWN_LICENCE = re.compile(
    r"Permission to use, copy|Permission is hereby granted|Redistribution and use"
    r"|freely, subject to the following|[Aa]ll [Rr]ights [Rr]eserved"
)
"""Matches licence terms other than Python's; files with them are left out."""

ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|vs|cf|resp|approx|incl|Dr|Mr|St|No)|\b[A-Z])\.$")
SENTENCE_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z])")
MARKUP = re.compile(r":[a-z:]+:`~?([^`<>]+)`|``([^`]+)``|`([^`']+)[`']")
BULLET = re.compile(r"^\s*(?:[-*+o]|\(?\d{1,2}[.)]|\(?[a-z]\))\s+")
CLEAN = re.compile(r"[A-Z][A-Za-z0-9 ,.;:'\"()/_?!%-]*[.?!]")
NOT_PROSE = re.compile(r"--|\.\.|\( |\s[,.;:?!)]|_\(|\(\)\.|[a-z]\(|::|https?:|(?<!\w)_|[\"']{2}")
INSIDE_A_WORD = "'-._"


def strip_casing_and_punctuation(sentence: str) -> str:
    """Returns the sentence in lower case, with a space for each punctuation mark outside of words.

    Apostrophes, hyphens, dots and underscores between two letters or digits are part of a word
    (don't, built-in, os.path, file_name, 3.11) and stay; whitespace is collapsed.
    """
    kept = []
    for position, mark in enumerate(sentence):
        before = sentence[position - 1 : position]
        after = sentence[position + 1 : position + 2]
        inside = mark in INSIDE_A_WORD and before.isalnum() and after.isalnum()
        kept.append(mark if mark.isalnum() or inside else " ")
    return " ".join("".join(kept).lower().split())


def library_files(library: Path) -> Iterator[Path]:
    """Yields the standard library's own modules in a fixed order."""
    for path in sorted(library.rglob("*.py"), key=lambda path: path.as_posix()):
        if not SKIPPED_FOLDERS & set(path.relative_to(library).parts):
            yield path


def read_texts(code: str) -> Iterator[str]:
    """Yields docstrings of the module, its classes and functions, then blocks of comment lines."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield text
    block: list[str] = []
    last_line = -2
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type != tokenize.COMMENT or token.line.strip() != token.string:
            continue
        if token.start[0] != last_line + 1:
            yield inspect.cleandoc("\n".join(block))
            block = []
        block.append(token.string.lstrip("#!:").removeprefix(" "))
        last_line = token.start[0]
    yield inspect.cleandoc("\n".join(block))


def split_sentences(text: str) -> Iterator[str]:
    """Yields the sentences of prose paragraphs, not of doctests, directives, tables or code."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.splitlines()
        if any(re.match(r"\s*(>>>|\.\. |[-=+|~^]{3})", line) for line in lines):
            continue
        if not lines or all(line.startswith("    ") for line in lines):
            continue
        for item in _list_items(lines):
            joined = MARKUP.sub(lambda match: next(filter(None, match.groups())), item)
            yield from _split_item(" ".join(joined.split()))


def _list_items(lines: list[str]) -> Iterator[str]:
    item: list[str] = []
    for line in lines:
        if BULLET.match(line):
            yield " ".join(item)
            item = []
        item.append(BULLET.sub("", line))
    yield " ".join(item)


def _split_item(text: str) -> Iterator[str]:
    sentence = ""
    for piece in SENTENCE_END.split(text):
        sentence = f"{sentence} {piece}".strip()
        if not ABBREVIATION.search(piece):
            yield sentence
            sentence = ""
    if sentence:
        yield sentence


def is_clean(sentence: str) -> bool:
    """Whether a sentence has 5 to 40 words, most of them plain, a capital, a full stop, no code."""
    words = sentence.split()
    plain = [word for word in words if re.fullmatch(r"[\"'(]*[A-Za-z'-]+[\"').,;:?!]*", word)]
    return (
        5 <= len(words) <= 40
        and CLEAN.fullmatch(sentence) is not None
        and NOT_PROSE.search(sentence) is None
        and sentence.count("(") == sentence.count(")")
        and sentence.count('"') % 2 == 0
        and len(plain) >= 0.85 * len(words)
        and sum(word.isupper() for word in words) <= 0.25 * len(words)
        and max(map(len, words)) <= 30
    )


def collect(library: Path) -> list[dict[str, str]]:
    """Returns rows in the order of files and lines; of near duplicates only the first."""
    seen: set[str] = set()
    rows = []
    for path in library_files(library):
        code = path.read_text(encoding="utf-8")
        texts = () if OWN_LICENCE.search(code) else read_texts(code)
        for sentence in (sentence for text in texts for sentence in split_sentences(text)):
            letters = re.sub(r"[^a-z]", "", sentence.lower())
            if is_clean(sentence) and letters not in seen:
                seen.add(letters)
                source = strip_casing_and_punctuation(sentence)
                rows.append({"source": source, "reference": sentence})
    return rows


def split_rows(rows: list[dict[str, str]], column: str) -> dict[str, list[dict[str, str]]]:
    """Splits rows by the hash of a column, so a row's split does not depend on other files."""
    ranked = sorted(rows, key=lambda row: hashlib.sha256(row[column].encode()).hexdigest())
    val = {row[column] for row in ranked[:VAL_ROWS]}
    test = {row[column] for row in ranked[VAL_ROWS : VAL_ROWS + TEST_ROWS]} - val
    splits: dict[str, list[dict[str, str]]] = {"train": [], "val": [], "test": []}
    for row in rows:
        name = "val" if row[column] in val else "test" if row[column] in test else "train"
        splits[name].append(row)
    return splits


def pack(rows: list[dict[str, str]]) -> bytes:
    """Returns the rows as JSON lines, gzipped without a time stamp."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return gzip.compress(lines.encode(), compresslevel=9, mtime=0)


def run(about: str, collect: Callable[[Path], list[dict[str, str]]], column: str, out: Path) -> int:
    """Runs a script that makes a data set: writes its files, or compares them with --check."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the files, write none")
    check = parser.parse_args().check
    if platform.python_version() != PYTHON_VERSION:
        note = f"note: this is Python {platform.python_version()}, the files are from"
        print(f"{note} {PYTHON_VERSION}: the rows will differ", file=sys.stderr)
    same = True
    rows_of = split_rows(collect(Path(sysconfig.get_paths()["stdlib"])), column)
    for name, rows in rows_of.items():
        path, packed = out / f"{name}.jsonl.gz", pack(rows)
        verdict = "written"
        if check:
            # zlib builds may compress the same lines to other bytes
            equal = path.is_file() and gzip.decompress(path.read_bytes()) == gzip.decompress(packed)
            same &= equal
            verdict = "same" if equal else "DIFFERENT"
        else:
            out.mkdir(exist_ok=True)
            path.write_bytes(packed)
        print(f"{path.name}: {len(rows)} rows, {len(packed)} bytes, {verdict}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(run(__doc__, collect, "source", OUT))
