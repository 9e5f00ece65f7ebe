"""Random numbers of a row: they follow from its key alone, whatever else is in its batch."""

from __future__ import annotations

import numpy as np


def row_generator(*key: int) -> np.random.Generator:
    """The generator of one row: of a seed, the row's number, and what else tells draws apart
    (epoch, mix). Neither batches nor the number of processes change what it gives."""
    return np.random.default_rng(key)
