"""What decoding a list of inputs takes, where a batch is not full to the list's end.

Sequences that are decoded together go from round to round together; one that ends makes room for
the next input of its wave, and behind the last input fewer and fewer are left. What rounds take is
known for the batch sizes that were timed. Of a size between two of them, what all sequences of a
round take together lies on a line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Array = np.ndarray
Shares = Mapping[int, Array]
"""By batch size: seconds of each sequence's rounds, its part of shared calls. [P] each."""


def seconds_together(shares: Shares, together: int) -> Array:
    """Seconds of each sequence's rounds, were so many decoded together all along. [P].

    Below the least size that was timed, a sequence's part is what it is there.
    """
    sizes = sorted(shares)
    least = sizes[0]
    if together <= least:
        return shares[least]
    totals = np.stack([size * shares[size] for size in sizes])
    of_all = [np.interp(together, sizes, column) for column in totals.T]
    return np.array(of_all) / together


def seconds_of_wave(shares: Shares, rounds: Array, wave: Sequence[int], batch_size: int) -> float:
    """Seconds of a wave's inputs, decoded in this order, `batch_size` of them together.

    rounds [P]: of each input, expected ones too.
    """
    waiting, left = list(wave), rounds.astype(np.float64)
    decoding: list[int] = []
    total = 0.0
    while waiting or decoding:
        while waiting and len(decoding) < batch_size:
            decoding.append(waiting.pop(0))
        together = min(left[decoding])
        a_round = seconds_together(shares, len(decoding))[decoding] / rounds[decoding]
        total += together * float(a_round.sum())
        left[decoding] -= together
        decoding = [one for one in decoding if left[one] > 1e-9]
    return total


def beside_rounds(
    runs: Sequence[tuple[Array, Shares, Array]],
    batch_size: int,
    waves: Sequence[Sequence[int]] | None = None,
) -> tuple[float, float]:
    """What a sequence takes beside its rounds, the median over waves, and how far off that is: the
    median of |predicted - measured| / measured.

    runs: of each, the inputs' measured seconds [P] (those of a wave sum to its seconds), what their
    rounds take, and how many they are [P]. waves: the inputs of each (default: one each).
    """
    missing, took = [], []
    for measured, shares, rounds in runs:
        for wave in waves or [[one] for one in range(len(measured))]:
            own = list(wave)
            seconds = float(measured[own].sum())
            known = seconds_of_wave(shares, rounds, own, batch_size)
            missing.append((seconds - known) / len(own))
            took.append(seconds / len(own))
    constant = max(0.0, float(np.median(missing)))
    off = np.abs(np.array(missing) - constant) / np.array(took)
    return constant, float(np.median(off))
