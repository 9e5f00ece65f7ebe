"""Decode with several sequences at once, at each batch size asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from drafttrain.evaluation.batches.memory import peak_growth
from drafttrain.evaluation.jobs import Job
from drafttrain.evaluation.metrics import identical
from drafttrain.evaluation.options import EvaluationOptions
from drafttrain.evaluation.parity import compare_outputs
from drafttrain.evaluation.report import BatchResult, Parity
from drafttrain.evaluation.runner import Decoded, make_waves, run_interleaved
from drafttrain.evaluation.summary import Context, speed_metrics


@dataclass(frozen=True)
class Batch:
    """What the jobs did with at most so many sequences at once."""

    decoded: list[Decoded]
    memory: Mapping[str, int | None]
    """Peak bytes of a wave, by the job's name; None where they are not known."""


def measure_batches(
    jobs: Sequence[Job],
    alone: Sequence[Decoded],
    prompts: int,
    options: EvaluationOptions,
    device: torch.device,
    progress: bool = False,
) -> dict[int, Batch]:
    """The jobs at every batch size, by batch size; nothing where 1 is the only one.

    alone: what they did at batch size 1. Each batch size is a phase of its own, in which the jobs
    that take it are interleaved wave by wave; afterwards every one decodes a wave for its memory.
    """
    if len(options.batch_sizes) < 2:
        return {}
    found = {}
    for size in options.batch_sizes:
        able = [job for job in jobs if job.takes(size)]
        if size == 1:
            decoded = list(alone)
        else:
            decoded = run_interleaved(able, prompts, options, device, progress, size)
        found[size] = Batch(decoded, wave_memory(able, prompts, size, options, device))
    return found


def wave_memory(
    jobs: Sequence[Job],
    prompts: int,
    batch_size: int,
    options: EvaluationOptions,
    device: torch.device,
) -> dict[str, int | None]:
    """Peak bytes that a wave takes by each job, by its name."""
    [wave, *_] = make_waves(prompts, batch_size, options.wave_batches)
    return {
        job.name: peak_growth(lambda job=job: job.decode(wave, batch_size), device) for job in jobs
    }


def batch_results(context: Context, batches: Mapping[int, Batch], name: str) -> list[BatchResult]:
    """A run at every batch size that it was measured at, in rising order."""
    alone = next(run for run in context.decoded if run.name == name)
    found = []
    for size, batch in sorted(batches.items()):
        run = next((run for run in batch.decoded if run.name == name), None)
        if run is None:
            continue
        together = replace(context, decoded=batch.decoded)
        own_streams = run.method is not None or context.options.sampling.greedy
        differing = len(run.outputs) - int(identical(run.outputs, alone.outputs).sum())
        found.append(
            BatchResult(
                batch_size=size,
                metrics=speed_metrics(together, run),
                differing=differing if own_streams else None,
                parity=check_batch(context, run, alone) if size > 1 else None,
                memory_bytes=batch.memory[name],
            )
        )
    return found


def check_batch(context: Context, run: Decoded, alone: Decoded) -> Parity | None:
    """Compares a lossless greedy run of this engine with itself at batch size 1."""
    options = context.options
    if run.method is None or not run.lossless or not options.sampling.greedy:
        return None
    outputs, limit = (run.outputs, alone.outputs), options.max_new_tokens
    return compare_outputs(context.model, context.prompts, *outputs, limit, "batch size 1")
