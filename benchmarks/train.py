"""Measure the speed of Spec-Drafter training and where the time of a step goes.

    python -m benchmarks.train --config recipes/multi30k_en_de.yaml target.path=MODEL \\
        data.path=MULTI30K/train.en.gz distilled=FOLDER --out train.json

Times steps of the training loop on the recipe's own batches; then profiles steps to measure the
share of each kind of work.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from time import perf_counter

from drafttrain.config.reading import load_settings
from drafttrain.config.recipes import SpecDrafterRecipe
from drafttrain.data.batches.slots import SlotBatch
from drafttrain.data.distill.recipe_rows import distilled_rows
from drafttrain.evaluation.bootstrap import Ratio, draw_resamples, estimate
from drafttrain.evaluation.report import describe_environment
from drafttrain.models.loading import load_target, load_tokenizer
from drafttrain.models.spec_drafter.build import make_config
from drafttrain.models.spec_drafter.layout import PADDING
from drafttrain.training.loop import (
    Prepared,
    batches_of,
    count_steps,
    make_accelerator,
    prepare,
    take_step,
)
from recipes import train_spec_drafter as recipe

import numpy as np
import psutil
import torch
from torch.profiler import ProfilerActivity, profile

BATCHES = 200
"""Most batches to measure padding on."""


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse_arguments(arguments)
    settings = load_settings(SpecDrafterRecipe, given.config, given.overrides)
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_recipe(settings, Path(folder))
        padding = padding_of(prepared)
        bench = Bench(prepared, given.progress)
        rates = bench.rates(given.steps)
        report = {
            "recipe": str(given.config),
            "environment": describe_environment().model_dump(),
            "drafter": prepared.task.objective.model.config.to_dict(),
            "figures": rates | padding | bench.memory() | bench.shares(given.steps),
        }
    print(as_table(report["figures"]))
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", help="key=value settings of the recipe")
    parser.add_argument("--config", type=Path, default=Path("recipes/multi30k_en_de.yaml"))
    parser.add_argument("--steps", type=int, default=10, help="steps to measure")
    parser.add_argument(
        "--progress", type=float, default=0.5, help="training progress for glancing, 0 to 1"
    )
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    return parser.parse_args(arguments)


def prepare_recipe(settings: SpecDrafterRecipe, folder: Path) -> Prepared:
    """Prepares the recipe's task for training steps; distils missing outputs first."""
    accelerator = make_accelerator(settings.train, folder)
    target = load_target(settings.target)
    rows, _ = distilled_rows(settings.model_copy(update={"held_out": None}), target)
    mask = recipe.choose_mask(load_tokenizer(settings.target), target.model.config)
    identity = {"path": settings.target.path, "revision": settings.target.revision}
    config = make_config(target.model.config, settings.drafter, mask, identity)
    torch.manual_seed(settings.train.seed)
    drafter, _ = recipe.make_drafter(settings, config, target, rows)
    task = recipe.make_task(settings, drafter, rows, None, target)
    prepared = prepare(accelerator, task, settings.train)
    prepared.objective.train()
    return prepared


def padding_of(prepared: Prepared) -> dict[str, float]:
    """Shares of an epoch's rows that are not padding, and of slots that are inside a sentence."""
    total = count_steps(prepared.plan, prepared.settings, 1)
    steps = min(BATCHES, prepared.plan.batches_per_epoch, total)
    sums = np.zeros(6)
    for _, batch in batches_of(prepared, 0, max(1, steps // prepared.batches_per_step)):
        sums += counts_of(batch)
    encoder, encoder_rows, decoder, decoder_rows, inside, slots = sums
    return {
        "real_share": (encoder + decoder) / (encoder_rows + decoder_rows),
        "real_share_encoder": encoder / encoder_rows,
        "real_share_decoder": decoder / decoder_rows,
        "slots_inside_sentence_share": inside / slots,
    }


def counts_of(batch: SlotBatch) -> np.ndarray:
    """Counts real and all encoder rows, real and all decoder rows, slots inside their sentence and
    all slots."""
    layout, mask = batch.layout, batch.attention_mask
    block = layout.rows.block
    slots = layout.of_blocks(layout.labels)
    return np.array(
        [
            batch.input_ids.numel() if mask is None else int(mask.sum()),
            batch.input_ids.numel(),
            int((block != PADDING).sum()),
            block.numel(),
            int((slots >= 0).sum()),
            slots.numel(),
        ]
    )


@dataclass
class Bench:
    """Measures steps of one training run."""

    prepared: Prepared
    progress: float
    largest: int = 0
    """Rows (encoder and decoder, including padding) of the largest batch so far."""

    def __post_init__(self) -> None:
        if self.prepared.accelerator.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.stream = chain.from_iterable(
            batches_of(self.prepared, n, n + 50) for n in count(0, 50)
        )
        for _ in range(2):
            self.step(self.draw()[0])
        self.at_rest = psutil.Process().memory_info().rss

    def clock(self) -> float:
        """Returns the time in seconds after synchronising the device."""
        if self.prepared.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter()

    def draw(self) -> tuple[list[tuple[int, SlotBatch]], float]:
        """Returns the batches of the next step, and the seconds it took to make them."""
        started = self.clock()
        batches = list(islice(self.stream, self.prepared.batches_per_step))
        seconds = self.clock() - started
        rows = [int(counts_of(batch)[[1, 3]].sum()) for _, batch in batches]
        self.largest = max(self.largest, *rows)
        return batches, seconds

    def step(self, batches: list[tuple[int, SlotBatch]]) -> float:
        """Takes a step; returns its seconds."""
        started = self.clock()
        take_step(self.prepared, iter(batches), self.progress)
        return self.clock() - started

    def rates(self, steps: int) -> dict[str, float]:
        """Time of a step including batches and optimizer, with its interval over steps."""
        measured = []
        for _ in range(steps):
            batches, collation = self.draw()
            rows = sum(counts_of(batch)[[1, 3]].sum() for _, batch in batches)
            measured.append((self.step(batches) + collation, collation, rows))
        seconds, collation, rows = np.array(measured).T
        resamples = draw_resamples(steps, 2000)
        step = estimate(Ratio(1e3 * seconds, np.ones(steps)), resamples)
        return {
            "step_ms": step.value,
            "step_ms_low": step.low,
            "step_ms_high": step.high,
            "rows_per_second": float(rows.sum() / seconds.sum()),
            "collation_share": float(collation.sum() / seconds.sum()),
        }

    def shares(self, steps: int) -> dict[str, float]:
        """Shares of a step's time in the glancing pass and in the optimizer, from the profiler."""
        on_gpu = self.prepared.accelerator.device.type == "cuda"
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
        with profile(activities=kinds) as profiled:
            for _ in range(steps):
                self.step(self.draw()[0])
        events, device = profiled.key_averages(), "device" if on_gpu else "cpu"
        total = sum(getattr(event, f"self_{device}_time_total") for event in events)
        shares = dict.fromkeys(LABELS.values(), 0.0)
        for event in events:
            if (label := LABELS.get(event.key)) is not None:
                shares[label] += getattr(event, f"{device}_time_total") / total
        return shares

    def memory(self) -> dict[str, float]:
        """Peak memory, and peak memory above that between steps per row of the largest batch."""
        if self.prepared.accelerator.device.type == "cuda":
            peak, at_rest = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        else:
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
            at_rest = self.at_rest
        return {
            "peak_memory_mib": peak / 2**20,
            "memory_kib_a_row": max(0, peak - at_rest) / 2**10 / self.largest,
        }


LABELS = {"glancing": "glancing_share", "Optimizer.step#AdamW.step": "optimizer_share"}
"""Profiler ranges to report, with all work inside them, and the names of their figures."""


def as_table(figures: dict[str, float]) -> str:
    lines = ["| figure | value |", "| --- | ---: |"]
    for name, value in figures.items():
        share = "share" in name
        lines.append(f"| `{name}` | {f'{100 * value:.1f} %' if share else f'{value:,.1f}'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
