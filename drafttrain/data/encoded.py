"""Distilled rows with what the target's frozen encoder makes of their sources.

For drafters that read the target's encoder instead of encoding sources themselves. Texts are
encoded whenever they are asked for, a batch in one call. Clips take far longer (their encoder reads
30 s whatever they last), so theirs is kept on disk: where distillation has not left it, it is made
when it is first asked for.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PretrainedConfig

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import DataConfig
from drafttrain.data.batches.examples import Example, Examples
from drafttrain.data.encodings import KeptEncodings, encoded_bytes
from drafttrain.data.inputs.clips import DIGESTS
from drafttrain.data.inputs.hearing import hear
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.shards.writing import say
from drafttrain.decoding.engine.encoding import encoder_of
from drafttrain.decoding.engine.sources import make_source
from drafttrain.models.loading import LoadedTarget

EncodeRows = Callable[[Sequence[Example]], list[Tensor]]
"""What the encoder puts out for rows: [S, E] each."""


class EncodedExamples(Dataset):
    """`Examples` that hold what the target's encoder made of their sources."""

    def __init__(self, rows: datasets.Dataset, encode: EncodeRows) -> None:
        self._examples, self._encode = Examples(rows), encode

    def __len__(self) -> int:
        return len(self._examples)

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[Example]:
        examples = self._examples.__getitems__(keys)
        with torch.no_grad():
            encoded = self._encode(examples)
        return [
            example._replace(encoded=own) for example, own in zip(examples, encoded, strict=True)
        ]


def text_encoding(target: LoadedTarget) -> EncodeRows:
    """Of rows of texts: encoded anew each time, in one call."""
    encode = encoder_of(target.model)
    assert encode is not None

    def encode_rows(examples: Sequence[Example]) -> list[Tensor]:
        return encode([make_source(example.source_ids, target.model) for example in examples])

    return encode_rows


class ClipEncoding:
    """Of rows of clips: encoded once, then read from the folder.

    rows: the distilled rows; clips: the inputs that they were distilled from (`as_clips`).
    """

    def __init__(
        self, target: LoadedTarget, rows: datasets.Dataset, clips: datasets.Dataset, folder: Path
    ) -> None:
        self._target, self._clips = target, clips
        self._places = {number: place for place, number in enumerate(clips["row"][:])}
        self._numbers, self._digests = rows["row"][:], clips[DIGESTS][:]
        self._encode = encoder_of(target.model)
        self.kept = KeptEncodings(folder, target.model)

    def __call__(self, examples: Sequence[Example]) -> list[Tensor]:
        return [self.of(self._numbers[example.row]) for example in examples]

    def of(self, number: int) -> Tensor:
        """What the encoder makes of the clip with this row number. Shapes: -> [S, E], float16."""
        return self._read(self._places[number])

    def missing(self) -> int:
        """Clips of these rows that have not been encoded."""
        places = (self._places[number] for number in self._numbers)
        return sum(not self.kept.has(self._digests[place]) for place in places)

    def _read(self, place: int) -> Tensor:
        digest = self._digests[place]
        if not self.kept.has(digest):
            assert self._encode is not None
            [encoded] = self._encode([hear(self._target, self._clips[place])])
            self.kept.keep(digest, encoded)
        return self.kept.read(digest)


def heard_examples(
    target: LoadedTarget, rows: datasets.Dataset, data: DataConfig, folder: Path
) -> EncodedExamples:
    """Distilled rows of clips, with what the target's encoder makes of them, kept in a folder.

    data: the inputs that they were distilled from. Raises ConfigError as `tell_room`.
    """
    clips = load_inputs(data, heard=True)
    return EncodedExamples(rows, encode_clips(target, rows, clips, folder))


def encode_clips(
    target: LoadedTarget, rows: datasets.Dataset, clips: datasets.Dataset, folder: Path
) -> ClipEncoding:
    """`ClipEncoding`, once the disk that it takes has been said. Raises ConfigError as
    `tell_room`."""
    encoding = ClipEncoding(target, rows, clips, folder)
    tell_room(folder, encoding.missing(), target.model.config)
    return encoding


def tell_room(folder: Path, clips: int, target: PretrainedConfig) -> None:
    """Say what disk the clips still to be encoded will take. Raises ConfigError where there is not
    so much."""
    if not clips:
        return
    needed = encoded_bytes(clips, target)
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ConfigError(
            f"the encoder's outputs of {clips:,} clips take {needed / 2**20:,.0f} MiB in "
            f"{str(folder)!r}, but {free / 2**20:,.0f} MiB are free; make room, name another "
            "folder with encoded=, or use fewer clips (data.limit)"
        )
    say(
        f"{folder}: the encoder's outputs of {clips:,} clips will take {needed / 2**20:,.0f} MiB; "
        "each is made when it is first read"
    )
