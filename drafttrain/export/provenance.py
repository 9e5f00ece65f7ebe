"""What an export was made from, and under which licences: the card's front matter and a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCardData

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
NOT_STATED = "not stated"


@dataclass(frozen=True)
class Provenance:
    """Target, data and licences. None: nobody said."""

    target: str | None = None
    """Hub name or folder of the target."""
    license: str | None = None
    """Of the drafter, as the Hub names it."""
    target_license: str | None = None
    data: str | None = None
    """What the drafter was trained on: a Hub name, a file, or words."""
    data_license: str | None = None


def front_matter(made_from: Provenance, tags: Sequence[str]) -> str:
    """The card's YAML for the Hub. Only names that the Hub can know are put in it."""
    data = ModelCardData(
        library_name="transformers",
        tags=["speculative-decoding", "drafter", "drafttrain", *tags],
        license=made_from.license,
        base_model=_on_hub(made_from.target),
        datasets=_on_hub(made_from.data),
    )
    return f"---\n{data.to_yaml()}\n---"


def origin(made_from: Provenance) -> str:
    """A section that names target, data and the licence of each."""
    rows = [
        ("this drafter", None, made_from.license),
        ("its target", made_from.target, made_from.target_license),
        ("its training data", made_from.data, made_from.data_license),
    ]
    lines = ["## Origin and licences", "", "| what | which | licence |", "| --- | --- | --- |"]
    for what, which, licence in rows:
        shown = "" if what == "this drafter" else NOT_STATED if which is None else f"`{which}`"
        lines.append(f"| {what} | {shown} | {licence or NOT_STATED} |")
    lines += [
        "",
        "A drafter learns its target's outputs, and may start from its weights: the licences of "
        "target and data may bind it too.",
    ]
    return "\n".join(lines)


def _on_hub(name: str | None) -> str | None:
    """The name, if it can be one on the Hub and is nothing on this machine."""
    if name is None or Path(name).exists() or not HUB_NAME.fullmatch(name):
        return None
    return name
