"""Makes the embedded code data set: the functions of CPython's standard library.

    python data/make_functions.py            # writes data/functions/{train,val,test}.jsonl.gz
    python data/make_functions.py --check    # checks that the committed files are reproduced

Task: complete a function. A row is {"prompt": ..., "response": ...}: the prompt is the signature
and the docstring, the response is the rest of the body. Files are found, split by hash, packed and
checked as in `make_docstrings.py`. Needs only the standard library.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

from make_docstrings import OWN_LICENCE, library_files, run

OUT = Path(__file__).resolve().parent / "functions"
MOST_CHARACTERS = 1200
"""Maximal length of prompt and response together; longer functions are left out."""


def functions(code: str) -> Iterator[tuple[str, str]]:
    """Yields (signature and docstring, rest of the body) of every function, without decorators."""
    lines = code.splitlines(keepends=True)
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        documented = ast.get_docstring(node) is not None
        body = node.body[1:] if documented else node.body
        header_end = node.body[0].end_lineno if documented else node.body[0].lineno - 1
        if not body or header_end < node.lineno or body[0].lineno <= header_end:
            continue  # only a docstring, or all on one line
        header = lines[node.lineno - 1 : header_end]
        rest = lines[header_end : node.end_lineno]
        text = textwrap.dedent("".join(header + rest))
        cut = sum(len(line) for line in text.splitlines(keepends=True)[: len(header)])
        yield text[:cut], text[cut:].rstrip() + "\n"


def collect(library: Path) -> list[dict[str, str]]:
    """Returns rows in the order of files and lines; of equal bodies only the first."""
    seen: set[str] = set()
    rows = []
    for path in library_files(library):
        code = path.read_text(encoding="utf-8")
        if OWN_LICENCE.search(code):
            continue
        for prompt, response in functions(code):
            key = "".join(response.split())
            short = len(prompt) + len(response) <= MOST_CHARACTERS
            if short and len(key) > 40 and response.isascii() and key not in seen:
                seen.add(key)
                rows.append({"prompt": prompt, "response": response})
    return rows


if __name__ == "__main__":
    raise SystemExit(run(__doc__, collect, "prompt", OUT))
