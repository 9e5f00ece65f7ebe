"""A recipe's settings on tiny texts, and how it is run in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiny_targets import random_sentences


def write_texts(folder: Path, rows: int, held_out_rows: int) -> None:
    for name, count in (("train", rows), ("val", held_out_rows)):
        (folder / f"{name}.txt").write_text("\n".join(random_sentences(count)) + "\n")


def write_recipe(folder: Path, rows: int, held_out_rows: int, **settings: Any) -> Path:
    """recipe.yaml for the folder's target, on so many sentences to train and to validate on."""
    write_texts(folder, rows, held_out_rows)
    places = {
        "run": str(folder / "run"),
        "target": {"path": str(folder / "target")},
        "data": {"path": str(folder / "train.txt")},
        "held_out": {"path": str(folder / "val.txt")},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(places | settings))
    return file


def exit_code(main: Callable[[list[str]], None], *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)
