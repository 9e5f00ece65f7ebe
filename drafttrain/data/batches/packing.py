"""Several rows of texts in one sequence: which, and how they are fetched together."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Dataset

from drafttrain.data.batches.examples import Example, Examples


@dataclass(frozen=True)
class PackedExamples(Dataset):
    """Distilled rows, fetched by (epoch, sequence): each the examples that share a sequence."""

    rows: Examples | Dataset
    sequences: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[list[Example]]:
        wanted = [(epoch, row) for epoch, number in keys for row in self.sequences[number]]
        fetched = iter(self.rows.__getitems__(wanted))
        return [[next(fetched) for _ in self.sequences[number]] for _, number in keys]


def share_sequences(
    rows: Examples | Dataset, lengths: np.ndarray, most: int | None, taught: Sequence[int]
) -> tuple[PackedExamples, np.ndarray]:
    """Rows that are taught, several in a sequence of at most `most` tokens (`pack`) or, without it,
    each in one of its own; and the tokens of each sequence.

    Shapes: lengths [rows] -> [sequences].
    """
    chosen = np.asarray(taught)
    own = [[row] for row in range(len(chosen))] if most is None else pack(lengths[chosen], most)
    sequences = [chosen[places].tolist() for places in own]
    sizes = np.array([lengths[places].sum() for places in sequences])
    return PackedExamples(rows, sequences), sizes


def pack(lengths: np.ndarray, most: int) -> list[list[int]]:
    """Rows that share a sequence of at most so many tokens: the longest first, each where the least
    room is left for it (best fit, decreasing).

    A row that is longer has a sequence of its own. Shapes: lengths [rows].
    """
    sequences: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, sequence), the fullest first
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        place = bisect_left(room, (length, -1))
        left, number = room.pop(place) if place < len(room) else (most, len(sequences))
        if number == len(sequences):
            sequences.append([])
        sequences[number].append(row)
        insort(room, (left - length, number))
    return sequences
