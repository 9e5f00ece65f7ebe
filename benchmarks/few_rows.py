"""Products of a few rows with a matrix, by how the matrix lies in memory.

    python benchmarks/few_rows.py 256 1024 6000
    python benchmarks/few_rows.py 576 1536 --dtype bfloat16

Microseconds a product: rows of the matrix one behind the other, columns one behind the other,
oneDNN's packed layout, and that with rows repeated to four (`decoding/engine/products.py`). So many
matrices of a size are multiplied in turn that they do not stay in the processor's caches, as in a
model that is larger than these.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.decoding.engine.products import REPEATED_TO, by_packed, by_repeated, pack

ROWS = (1, 2, 3, 4, 6, 11, 16, 32)
BYTES = 100_000_000
REPEATS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", type=int, nargs="+", help="widths: every pair of them is measured")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    torch.set_num_threads(given.threads)
    print("| out x in | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |")
    print("| --- |" + " ---: |" * len(ROWS))
    for out, inner in product(given.sizes, repeat=2):
        figures = " | ".join(measure(out, inner, rows, dtype) for rows in ROWS)
        print(f"| {out} x {inner} | {figures} |", flush=True)


@torch.inference_mode()
def measure(out: int, inner: int, rows: int, dtype: torch.dtype) -> str:
    """Rows / columns / packed / repeated, in microseconds."""
    x = torch.randn(rows, inner).to(dtype)
    count = max(2, BYTES // (dtype.itemsize * out * inner))
    matrices = [torch.randn(out, inner).to(dtype) for _ in range(count)]
    packed = [pack(one) for one in matrices]
    ways: list[list[Callable[[], Tensor]]] = [
        [partial(F.linear, x, one) for one in matrices],
        [partial(F.linear, x, one.t().contiguous().t()) for one in matrices],
        [partial(by_packed, x, one, None) for one in packed],
    ]
    if rows < REPEATED_TO:
        ways.append([partial(by_repeated, x, one, None) for one in packed])
    return "/".join(f"{seconds * 1e6:.0f}" for seconds in map(timed, ways))


def timed(calls: Sequence[Callable[[], Tensor]]) -> float:
    """Median seconds of one call, all made in turn."""
    found = []
    for _ in range(REPEATS + 1):
        began = perf_counter()
        for call in calls:
            call()
        found.append((perf_counter() - began) / len(calls))
    return median(found[1:])


if __name__ == "__main__":
    main()
