"""What do compiled calls of one sequence take of the eager time, and what does it cost to start?

    OMP_NUM_THREADS=1 python -m benchmarks.compiled_calls --target FOLDER --drafter FOLDER

Run it twice, with TORCHINDUCTOR_CACHE_DIR naming a folder that does not exist at first: the second
start finds there what torch keeps. Compiled and eager calls are made in turn, in blocks; the share
is that of the medians. A call is what `run_stack` does, behind 41 tokens; the scores of tokens are
worked out eagerly in any case.
"""

from __future__ import annotations

import argparse
import json
import statistics
from time import perf_counter, thread_time

import torch

from benchmarks.rounds import open_drafter
from drafttrain.config.inputs import TargetConfig
from drafttrain.decoding.engine import compiling
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.evaluation.environment import describe_environment
from drafttrain.models.loading import load_target


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="folder or Hub name of the target")
    parser.add_argument("--drafter", required=True, help="folder of a Spec-Drafter")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6, 11])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--options", type=json.loads, default={}, help="settings of inductor, as JSON"
    )
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    compiling.OPTIONS.update(given.options)
    target = load_target(TargetConfig(path=given.target))
    engines = {
        "target": CachedModel(target.model).engine,
        "drafter": open_drafter(given.drafter, target).engine,
    }
    print(f"{describe_environment().cpu}, {given.threads} thread(s), {compiling.OPTIONS}")
    now = thread_time if given.threads == 1 else perf_counter
    for name, engine in engines.items():
        began, worked = perf_counter(), thread_time()
        print(f"{name}: {engine.compile('on')}")
        print(
            f"  start: {perf_counter() - began:.1f} s, {thread_time() - worked:.1f} of this thread"
        )
        for rows in given.rows:
            shares = [engine.compiled.share(rows, now) for _ in range(given.repeats)]
            print(
                f"  {rows:2} rows: {statistics.median(shares):.2f} of the eager time "
                f"({min(shares):.2f} to {max(shares):.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
