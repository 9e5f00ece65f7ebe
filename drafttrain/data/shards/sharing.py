"""Several launches that fill one folder with shards and share nothing but that folder.

Each is told its share of the shards, and keeps to it: no launch waits for another, and whichever
finds all shards there when it ends completes the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from drafttrain.config.base import ConfigError
from drafttrain.data.shards.writing import LOCK, remove_leftovers


@dataclass(frozen=True)
class Share:
    """The shards whose number is `index` modulo `count`."""

    index: int = 0
    count: int = 1

    @property
    def lock(self) -> str:
        """Name of the file that keeps a second launch from the same share."""
        return LOCK if self.count == 1 else f".writing-{self.index}-of-{self.count}.lock"

    def of(self, shards: Iterable[int]) -> list[int]:
        """Those of some shards that are in this share."""
        return [shard for shard in shards if shard % self.count == self.index]

    def remove_leftovers(self, folder: Path, files: Iterable[Path]) -> None:
        """Half-written files of a killed launch, but not those of other shares' launches.

        files: those that this share has still to write in the folder, or in folders of it.
        """
        if self.count == 1:
            for place in (folder, *(path for path in folder.iterdir() if path.is_dir())):
                remove_leftovers(place)
        for file in files:
            remove_leftovers(file.parent, file.name)


def read_share(text: str | None) -> Share:
    """The share that `0/4` names: the first of four. Raises ConfigError."""
    if text is None:
        return Share()
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(
            f"share = {text!r} is none of 0/4, 1/4, 2/4, 3/4 or the like; give this launch's "
            "number, from 0, and how many launches there are"
        )
    return Share(int(match[1]), int(match[2]))
