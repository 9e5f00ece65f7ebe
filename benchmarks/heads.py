"""What does training acceptance heads from the cache save, and training them together?

    python benchmarks/heads.py
    python benchmarks/heads.py --drafter FOLDER --cache FOLDER --out heads.json

Two comparisons, both with the training loop's own steps (reading, loss, gradients, optimizer) on
the same batches, interleaved, several times over:

- a head trained from the cache, and one for which the drafter's states are computed anew in each
  step by the pass that makes the cache (for `token` states without logits, which they do not need);
- a sweep of heads trained together, and the same heads one after the other.

Without arguments a random drafter and random tokens are used: speed does not depend on values.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from drafttrain.config.inputs import TargetConfig
from drafttrain.config.recipes import HeadConfig, TrainConfig
from drafttrain.data.batches.head_batches import CachedRows, HeadBatch, whole_batch
from drafttrain.data.shards.outputs import load_distilled
from drafttrain.data.shards.states import (
    CacheManifest,
    HiddenCache,
    Labelled,
    ModelIdentity,
    open_cache,
    read_column,
    shard_path,
    write_shard,
)
from drafttrain.data.shards.store import write_manifest
from drafttrain.decoding.engine.teacher_forcing import forced_states, teacher_force
from drafttrain.evaluation.bootstrap import with_interval
from drafttrain.evaluation.environment import describe_environment
from drafttrain.models.draft_states import drawn_states
from drafttrain.models.drafters import load_drafter_beside
from drafttrain.models.identity import hash_weights
from drafttrain.models.loading import load_target
from drafttrain.training.loop import (
    Prepared,
    Task,
    batches_of,
    make_accelerator,
    prepare,
    take_step,
)
from drafttrain.training.objectives.head_sweep import HeadSweep, make_heads

ONE = HeadConfig(depths=(3,), rejection_weights=(6.0,))
"""The paper's best head, for the comparison with recomputed states."""
SWEEP = HeadConfig(depths=(0, 1, 2, 3, 4), rejection_weights=(1.0, 3.0, 6.0, 12.0))
"""The paper's twenty heads."""
ROWS, PROMPT, OUTPUT, VOCABULARY = 256, 32, 96, 2048
"""Rows and their tokens where nothing else is given."""


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.drafter is None:
            drafter = random_drafter()
            cache, texts = random_cache(Path(folder) / "cache", drafter, arguments.dtype)
        else:
            cache = open_cache(arguments.cache)
            drafter = load_drafter(arguments.drafter, cache.manifest)
            texts = outputs_of(cache)
        bench = Bench(arguments, cache, RecomputedRows(cache, drafter, texts), Path(folder))
        figures = compare_cache(bench) | compare_sweep(bench)
    for name, value in figures.items():
        print(f"{name:34} {value:10.3f}")
    report = {
        "drafter": arguments.drafter or "random",
        "clock": arguments.clock,
        "environment": describe_environment().model_dump(),
        "figures": figures,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafter", help="folder of a token-by-token drafter; default: random")
    parser.add_argument("--cache", type=Path, help="hidden cache made with this drafter")
    parser.add_argument("--steps", type=int, default=10, help="steps of each variant in a repeat")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batch-tokens", type=int, default=4096, help="positions in a step")
    parser.add_argument("--dtype", default="float32", help="of a random drafter's cache")
    parser.add_argument("--threads", type=int, help="CPU threads; default: the usable cores")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: processor time of this process, where other programs share the machine",
    )
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    if (arguments.drafter is None) != (arguments.cache is None):
        parser.error("--drafter and --cache belong together; give both or neither")
    return arguments


@dataclass(frozen=True)
class Texts:
    """What the drafter reads for each row of a cache."""

    sources: list[list[int]]
    targets: list[list[int]]
    """The outputs themselves instead of their mixes: as many tokens, so the same work."""


class RecomputedRows(Dataset):
    """The rows of a cache, their states computed anew by the pass that makes the cache."""

    def __init__(self, cache: HiddenCache, drafter: PreTrainedModel, texts: Texts):
        self.drafter, self.texts = drafter, texts
        self.recompute = drawn_anew if cache.manifest.state == "drawn" else forced_states
        ends = cache.lengths(0).cumsum()[:-1]
        columns = [
            np.split(np.concatenate(read_column(cache.folder, cache.manifest, 0, name)), ends)
            for name in ("positions", "acceptance")
        ]
        self.positions, self.labels = ([torch.from_numpy(x) for x in one] for one in columns)

    def __len__(self) -> int:
        return len(self.positions)

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[HeadBatch]:
        rows = sorted(row for _, row in keys)
        states = self.recompute(
            self.drafter,
            [self.texts.sources[row] for row in rows],
            [self.texts.targets[row] for row in rows],
        )
        chosen = [s[self.positions[row].long()] for s, row in zip(states, rows, strict=True)]
        return [HeadBatch(torch.cat(chosen), torch.cat([self.labels[row] for row in rows]))]


def drawn_anew(
    drafter: PreTrainedModel, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> list[Tensor]:
    """The `drawn` states of outputs, as if each token had been drawn: the same work."""
    return [
        drawn_states(forced.before, forced.logits, torch.tensor(target))
        for forced, target in zip(teacher_force(drafter, sources, targets), targets, strict=True)
    ]


@dataclass(frozen=True)
class Bench:
    """What both comparisons share."""

    arguments: argparse.Namespace
    cache: HiddenCache
    recomputed: RecomputedRows
    folder: Path

    def prepare(self, heads: HeadConfig, rows: Dataset) -> Prepared:
        settings = TrainConfig(
            max_steps=(self.arguments.repeats + 1) * self.arguments.steps,
            batch_tokens=self.arguments.batch_tokens,
            threads=self.arguments.threads,
            clip=None,
        )
        sweep = HeadSweep(make_heads(heads, self.cache.manifest.hidden_size, seed=0))
        lengths = CachedRows(self.cache).lengths()
        task = Task(sweep, rows, lengths, whole_batch)
        return prepare(make_accelerator(settings, self.folder), task, settings)

    def seconds(self, prepared: Prepared, repeat: int) -> float:
        """Time of the steps of one repeat; every variant takes the same batches."""
        clock = perf_counter if self.arguments.clock == "wall" else process_time
        first = repeat * self.arguments.steps
        batches = batches_of(prepared, first, first + self.arguments.steps)
        started = clock()
        for _ in range(self.arguments.steps):
            take_step(prepared, batches, 0.0)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return clock() - started

    def interleave(self, variants: Sequence[Sequence[Prepared]]) -> np.ndarray:
        """Seconds of each variant, a sequence of trainings, in turns. -> [variants, repeats]."""
        times = np.zeros((len(variants), self.arguments.repeats))
        for repeat in range(-1, self.arguments.repeats):  # one to warm up
            order = range(len(variants)) if repeat % 2 else reversed(range(len(variants)))
            for variant in order:
                taken = sum(self.seconds(one, max(repeat, 0)) for one in variants[variant])
                if repeat >= 0:
                    times[variant, repeat] = taken
        return times


def compare_cache(bench: Bench) -> dict[str, float]:
    """Figures of one head: states from the cache, and recomputed."""
    rows = CachedRows(bench.cache), bench.recomputed
    cached, recomputed = (bench.prepare(ONE, one) for one in rows)
    flops = count_flops(recomputed) / count_flops(cached)
    times = bench.interleave([[cached], [recomputed]])
    per_step = 1e3 * np.median(times, axis=1) / bench.arguments.steps
    figures = {"step_ms_cached": per_step[0], "step_ms_recomputed": per_step[1]}
    figures |= ratio_of_medians("time_recomputed_over_cached", times[1], times[0])
    time_ratio = figures["time_recomputed_over_cached"]
    return figures | {
        "flops_recomputed_over_cached": flops,
        "time_ratio_over_flops_ratio": time_ratio / flops,
    }


def compare_sweep(bench: Bench) -> dict[str, float]:
    """Figures of twenty heads: together, and one by one."""
    rows = CachedRows(bench.cache)
    together = bench.prepare(SWEEP, rows)
    alone = [
        bench.prepare(HeadConfig(depths=(depth,), rejection_weights=(weight,)), rows)
        for depth in SWEEP.depths
        for weight in SWEEP.rejection_weights
    ]
    times = bench.interleave([[together], alone])
    per_step = 1e3 * np.median(times, axis=1) / bench.arguments.steps
    figures = {"step_ms_sweep": per_step[0], "step_ms_one_by_one": per_step[1]}
    return figures | ratio_of_medians("time_sweep_over_one_by_one", times[0], times[1])


def ratio_of_medians(name: str, above: np.ndarray, below: np.ndarray) -> dict[str, float]:
    """Ratio of median times with its 95 % bootstrap interval over the repeats."""
    draws = np.random.default_rng(0).integers(0, len(above), (2000, len(above)))
    resampled = np.median(above[draws], axis=1) / np.median(below[draws], axis=1)
    found = with_interval(float(np.median(above) / np.median(below)), resampled)
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def count_flops(prepared: Prepared) -> int:
    """Floating-point operations of the products in one step."""
    left_out_by_torch = {
        torch.ops.aten.addmm_: product_flops,
        torch.ops.aten.baddbmm_: product_flops,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    }
    with FlopCounterMode(display=False, custom_mapping=left_out_by_torch) as counter:
        take_step(prepared, batches_of(prepared, 0, 1), 0.0)
    return counter.get_total_flops()


def product_flops(added: tuple, one: tuple, other: tuple, **_) -> int:
    """Of `added + one @ other`, from their shapes."""
    return 2 * math.prod(one) * other[-1]


def attention_flops(query: tuple, key: tuple, value: tuple, *_, **__) -> int:
    """Of scores and weighted values, from shapes [B, H, T, C]; all of a causal square counts."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def load_drafter(path: str, manifest: CacheManifest) -> PreTrainedModel:
    """The drafter that the cache was made with."""
    target = load_target(TargetConfig(path=manifest.target.path))
    drafter = load_drafter_beside(target, path)
    if hash_weights(drafter) != manifest.drafter.weights_sha256:
        raise SystemExit(f"--drafter {path} is not the drafter that the cache was made with")
    return drafter


def outputs_of(cache: HiddenCache) -> Texts:
    """The distilled rows that a cache was made from."""
    wanted = {number: index for index, number in enumerate(cache.row_numbers.tolist())}
    rows = [row for row in load_distilled(cache.manifest.distilled) if row["row"] in wanted]
    rows.sort(key=lambda row: wanted[row["row"]])
    return Texts([row["source_ids"] for row in rows], [row["target_ids"] for row in rows])


def random_drafter() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config).eval()


def random_cache(folder: Path, drafter: PreTrainedModel, dtype: str) -> tuple[HiddenCache, Texts]:
    """A cache of random tokens with random labels, one mix, r = 0.15."""
    random = np.random.default_rng(0)
    tokens = random.integers(3, VOCABULARY, (ROWS, PROMPT + OUTPUT)).tolist()
    texts = Texts([row[:PROMPT] for row in tokens], [row[PROMPT:] for row in tokens])
    labelled = []
    for row in range(ROWS):
        (hidden,) = forced_states(drafter, [texts.sources[row]], [texts.targets[row]])
        positions = torch.from_numpy(np.flatnonzero(random.random(OUTPUT) >= 0.15))
        labels = torch.from_numpy(random.random(len(positions), dtype=np.float32))
        labelled.append(Labelled(row, positions, hidden[positions], labels))
    nobody = ModelIdentity(path="random", weights_sha256="", model_type="llama")
    manifest = CacheManifest(
        state="token",
        target=nobody,
        drafter=nobody,
        hidden_size=drafter.config.hidden_size,
        tokenizer_sha256="",
        distilled="",
        outputs_sha256="",
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        mixing=0.15,
        k=None,
        blocks_per_row=None,
        mixes=1,
        dtype=dtype,
        seed=0,
        batch_tokens=4096,
        shard_rows=ROWS,
        rows=ROWS,
        versions={},
        counts=(sum(len(one.positions) for one in labelled),),
    )
    write_shard(shard_path(folder, 0, 0), labelled, manifest)
    write_manifest(folder, manifest)
    return open_cache(folder), texts


if __name__ == "__main__":
    main()
