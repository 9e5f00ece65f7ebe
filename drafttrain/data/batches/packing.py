"""Packing of several text rows into one sequence, and fetching the packed rows."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Dataset

from drafttrain.data.batches.examples import Example, Examples


@dataclass(frozen=True)
class PackedExamples(Dataset):
    """Distilled rows, fetched by (epoch, sequence); returns a list of examples per sequence."""

    rows: Examples | Dataset
    sequences: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[list[Example]]:
        wanted = [(epoch, row) for epoch, number in keys for row in self.sequences[number]]
        fetched = iter(self.rows.__getitems__(wanted))
        return [[next(fetched) for _ in self.sequences[number]] for _, number in keys]


def share_sequences(
    rows: Examples | Dataset, lengths: np.ndarray, most: int | None, labelled: Sequence[int]
) -> tuple[PackedExamples, np.ndarray]:
    """Returns the rows in `labelled`, packed into sequences of at most `most` tokens (`pack`), and
    the number of tokens of each sequence. most: None for one row per sequence.

    Shapes: lengths [rows] -> [sequences].
    """
    chosen = np.asarray(labelled)
    own = [[row] for row in range(len(chosen))] if most is None else pack(lengths[chosen], most)
    sequences = [chosen[indices].tolist() for indices in own]
    sizes = np.array([lengths[indices].sum() for indices in sequences])
    return PackedExamples(rows, sequences), sizes


def pack(lengths: np.ndarray, most: int) -> list[list[int]]:
    """Packs rows into sequences of at most `most` tokens by best-fit decreasing: longest row first,
    each into the fullest sequence that still has space.

    A row longer than `most` gets its own sequence. Shapes: lengths [rows].
    """
    sequences: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens, sequence), fullest first
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        index = bisect_left(free, (length, -1))
        left, number = free.pop(index) if index < len(free) else (most, len(sequences))
        if number == len(sequences):
            sequences.append([])
        sequences[number].append(row)
        insort(free, (left - length, number))
    return sequences
