"""What config.json says of rotary positions, under the names of Transformers 4 too.

Transformers 5 writes `rope_parameters`; Transformers 4, and programs that read config.json by its
names (TensorRT-LLM's requirements had 4.57.1 before 5), know `rope_theta`, `rope_scaling` and
`partial_rotary_factor`. They take the first of them for 10,000 where it is missing, without a
word: the drafter loads, and drafts badly. Transformers 5 reads both to the same thing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

OWN = ("rope_theta", "partial_rotary_factor")
"""Entries that stand beside `rope_scaling` in Transformers 4, not in it."""


def write_older_names(folder: Path) -> None:
    """Add them to a folder's config.json, which must not be in use yet."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config.update(older_names(config))
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def older_names(config: Mapping[str, object]) -> dict[str, object]:
    """The entries of Transformers 4 that a config.json of Transformers 5 stands for.

    None for a model without rotary positions, and none where each type of layers has its own:
    Transformers 4 had another name for that in each family.
    """
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        return {}
    names = {name: rope[name] for name in OWN if name in rope}
    if rope.get("rope_type", "default") != "default":
        names["rope_scaling"] = {name: rope[name] for name in rope if name not in OWN}
    return {name: value for name, value in names.items() if name not in config}
