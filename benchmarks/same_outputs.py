"""Do two distillations of the same inputs hold the same outputs, and how near are ties where not?

    drafttrain distill --target SMOLLM2 --data prompts.jsonl data.chat=true --backend engine \\
        --out here
    llama-server -m target-f32.gguf -ctk f32 -ctv f32 --port 8080 &
    drafttrain distill --target SMOLLM2 --data prompts.jsonl data.chat=true \\
        --server http://localhost:8080 --out served
    python -m benchmarks.same_outputs --target SMOLLM2 here served

Two programs round differently, and an output goes another way where the target's two likeliest
tokens are nearly as likely. At each first difference this prints the gap between their logits, as
the target has them here. Rows that one folder lacks, or has twice, are counted too.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from drafttrain.config.inputs import TargetConfig
from drafttrain.data.shards.outputs import read_manifest, read_shards
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.evaluation.metrics import first_difference
from drafttrain.evaluation.parity import top_two_gap
from drafttrain.models.loading import load_target

Outputs = dict[int, tuple[list[int], list[int]]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="folder or Hub name of a language model")
    parser.add_argument("folders", nargs=2, type=Path, help="two folders of drafttrain distill")
    given = parser.parse_args()
    first, second = (read_outputs(folder) for folder in given.folders)
    shared = sorted(first.keys() & second.keys())
    print(f"rows in one folder alone: {len(first.keys() ^ second.keys())}; in both: {len(shared)}")
    if not shared:
        parser.error("the folders share no row that is ok in both")
    other = [row for row in shared if first[row][0] != second[row][0]]
    if other:
        parser.error(f"{len(other)} rows have other inputs, the first is row {other[0]}")
    model = CachedModel(load_target(TargetConfig(path=given.target)).model)
    gaps = []
    for row in shared:
        source, output = first[row]
        position = first_difference(output, second[row][1])
        if position is not None:
            own = make_source(torch.tensor(source), model.model)
            gap = top_two_gap(model, own, output[:position], len(output) + 1)
            gaps.append(gap)
            print(f"row {row}: first difference at token {position}, gap {gap:.5f}")
    print(f"{len(shared) - len(gaps)} of {len(shared)} outputs are the same")
    if gaps:
        median, most = np.median(gaps), max(gaps)
        print(f"gaps of the likeliest two: median {median:.5f}, largest {most:.5f}")


def read_outputs(folder: Path) -> Outputs:
    """Input and output of every row that is ok, by its number."""
    table = read_shards(folder, read_manifest(folder))
    rows = [row for row in table.to_pylist() if row["status"] == "ok"]
    twice = [row for row, count in Counter(row["row"] for row in rows).items() if count > 1]
    print(f"{folder}: {len(rows)} rows ok of {len(table)}, {len(twice)} twice")
    return {row["row"]: (row["source_ids"], row["target_ids"]) for row in rows}


if __name__ == "__main__":
    main()
