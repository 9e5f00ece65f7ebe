"""Products of a few rows with a matrix, by how the matrix lies in memory.

    python benchmarks/few_rows.py 256 1024 6000
    python benchmarks/few_rows.py 576 1536 --dtype bfloat16
    python benchmarks/few_rows.py --target FOLDER --dtype bfloat16

Microseconds a product: rows of the matrix one behind the other, columns one behind the other,
oneDNN's packed layout, and that with rows repeated to four (`decoding/engine/products.py`). So many
matrices of a size are multiplied in turn that they do not stay in the processor's caches, as in a
model that is larger than these.

--target: milliseconds of whole calls of a decoder-only model instead, behind 100 tokens, all its
large products made in the same way, and each in the one that was chosen for it; in turn.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.config.inputs import TargetConfig
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.products import (
    REPEATED_TO,
    Ways,
    by_packed,
    by_repeated,
    pack,
    products_of,
)
from drafttrain.decoding.engine.sources import make_source
from drafttrain.models.loading import load_target

ROWS = (1, 2, 3, 4, 6, 11, 16, 32)
BYTES = 100_000_000
REPEATS = 7
HISTORY = 100
CALLS = 5
"""Times that every number of rows has its turn with every way."""
IN_A_ROW = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sizes", type=int, nargs="*", help="widths: every pair of them is measured")
    parser.add_argument("--target", help="a folder: its calls are measured instead")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    given = parser.parse_args()
    if bool(given.sizes) == bool(given.target):
        parser.error("give widths, or --target")
    dtype = getattr(torch, given.dtype)
    torch.set_num_threads(given.threads)
    names = ["calls" if given.target else "out x in", *(f"{rows} rows" for rows in ROWS)]
    print("| " + " | ".join(names) + " |")
    print("| --- |" + " ---: |" * len(ROWS))
    if given.target:
        for way, seconds in measure_calls(given.target, given.dtype).items():
            print(f"| {way} | " + " | ".join(f"{1e3 * one:.1f}" for one in seconds) + " |")
    for out, inner in product(given.sizes, repeat=2):
        figures = " | ".join(measure(out, inner, rows, dtype) for rows in ROWS)
        print(f"| {out} x {inner} | {figures} |", flush=True)


@torch.inference_mode()
def measure_calls(folder: str, dtype: str) -> dict[str, list[float]]:
    """Median seconds of a call, by the way in which products are made and by rows."""
    model = load_target(TargetConfig(path=folder, dtype=dtype)).model
    engine = CachedModel(model)
    products = [one for one in products_of(engine.engine.stack) if one.packs]
    ids = torch.arange(100, 100 + HISTORY + 1 + max(ROWS), device=engine.device)
    few = frozenset(range(1, REPEATED_TO))
    same = {"as it lies": Ways(max(ROWS)), "packed": Ways(0), "repeated": Ways(0, few)}
    ways = {name: [way] * len(products) for name, way in same.items()}
    ways["as chosen"] = [one.ways for one in products]
    found = defaultdict(list)
    for _, (name, chosen), rows in product(range(CALLS + 1), ways.items(), ROWS):
        for one, way in zip(products, chosen, strict=True):
            one.ways = way
        state = engine.encode(make_source(ids[:HISTORY], model))
        engine.feed(state, ids[: HISTORY + 1])
        for _ in range(IN_A_ROW):
            began = perf_counter()
            engine.feed(state, ids[HISTORY + 1 : HISTORY + 1 + rows])
            found[name, rows].append(perf_counter() - began)
            engine.forget(state, HISTORY + 1)
    return {name: [median(found[name, rows][IN_A_ROW:]) for rows in ROWS] for name in ways}


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
