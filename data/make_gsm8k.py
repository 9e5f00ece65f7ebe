"""Makes the embedded prompts of grade-school mathematics from the files of GSM8K.

    python data/make_gsm8k.py TRAIN.jsonl[.gz] TEST.jsonl[.gz]            # writes data/gsm8k/
    python data/make_gsm8k.py TRAIN.jsonl[.gz] TEST.jsonl[.gz] --check    # compares, writes nothing

A row is {"prompt": ...}: a question in the form that the GSM8K pair in checkpoints/ was trained on.
`train` has the first 1,500 training questions, `val` 100 of those after row 7,000, which the pair
has not seen, `test` the first 100 of the test file. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

from make_docstrings import pack

OUT = Path(__file__).resolve().parent / "gsm8k"


def read_prompts(path: Path) -> list[dict[str, str]]:
    """Returns one prompt per line of the file."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    questions = (json.loads(line)["question"] for line in text.decode().splitlines())
    return [{"prompt": f"Question: {question}\nAnswer: "} for question in questions]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train", type=Path, help="GSM8K's training file")
    parser.add_argument("test", type=Path, help="GSM8K's test file, or a part of it")
    parser.add_argument("--check", action="store_true", help="compare with the files, write none")
    options = parser.parse_args()
    train, test = read_prompts(options.train), read_prompts(options.test)
    same = True
    parts = {"train": train[:1500], "val": train[7000:7100], "test": test[:100]}
    for name, rows in parts.items():
        path = OUT / f"{name}.jsonl.gz"
        verdict = "written"
        if options.check:
            equal = gzip.decompress(path.read_bytes()) == gzip.decompress(pack(rows))
            same &= equal
            verdict = "same" if equal else "DIFFERENT"
        else:
            OUT.mkdir(exist_ok=True)
            path.write_bytes(pack(rows))
        print(f"{path.name}: {len(rows)} rows, {verdict}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
