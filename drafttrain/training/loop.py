"""The training loop on Accelerate, shared by all objectives.

A step is `world size x accumulation` batches of the plan. Its loss is the sum over all of them
divided by the sum of their weights, so the result does not depend on how a step is split. Each
batch seeds its random numbers from (seed, batch number), so a resumed run repeats the uninterrupted
run bit for bit. Several independent models may be trained at once (`Objective.parts`), each with
its own loss, normaliser and gradient norm, as if it were trained separately.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_all_start_methods
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, parse_flag_from_env, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers.integrations import unset_hf_deepspeed_config

from drafttrain.config.base import ConfigError, Interrupted, counted
from drafttrain.config.progress import tracking
from drafttrain.config.recipes import TrainConfig
from drafttrain.data.batches.batch_plan import BatchPlan
from drafttrain.data.batches.examples import Batch, Example
from drafttrain.data.shards.writing import join_processes
from drafttrain.training.batches import Waiting, leave_signals
from drafttrain.training.checkpoints import (
    KEPT_CHECKPOINTS,
    Progress,
    Schedule,
    average_weights,
    checkpoint_folders,
    is_sharded,
    load_checkpoint,
    save_checkpoint,
)
from drafttrain.training.compiling import compile_layers
from drafttrain.training.losses import LossSums, mean_rates
from drafttrain.training.objective import Objective, mixed_seed
from drafttrain.training.run_folder import LOOSE, MetricsLog
from drafttrain.training.sharding import check_sharding, copy_to_shard, whole_objective
from drafttrain.training.stop_signal import StopSignal
from drafttrain.training.threads import choose_threads


class Diverged(ValueError):
    """The loss is NaN or infinite."""


@dataclass(frozen=True)
class Task:
    """An objective with its training rows, collator and validation."""

    objective: Objective
    rows: Dataset
    """`Examples`, or another data set with (epoch, row) keys."""
    lengths: np.ndarray
    """[rows] tokens of each row, for batches by token budget; [rows, 2] if source and output are
    padded separately."""
    collate: Callable[[Sequence[Example]], Batch]
    """Creates the objective's batch; random draws are seeded with the examples' epochs and rows."""
    validate: Callable[[Objective], dict[str, float]] | None = None
    """Returns metrics on held-out rows; called in evaluation mode on the main process."""
    complete: Callable[[Batch], Batch] | None = None
    """Adds the target's encoder states to a batch, on its device."""
    in_process: bool = False
    """Whether fetching rows may call a model, which is impossible in a worker process."""
    constant_loss: float | None = None
    """Loss of the best constant prediction (`losses.constant_loss`), to compare the loss with."""


@dataclass(frozen=True)
class Prepared:
    """A task with objective and optimizer as prepared by Accelerate."""

    accelerator: Accelerator
    task: Task
    settings: TrainConfig
    plan: BatchPlan
    objective: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def batches_per_step(self) -> int:
        return self.accelerator.num_processes * self.settings.accumulation


def make_plan(lengths: np.ndarray, settings: TrainConfig) -> BatchPlan:
    """Returns the batch plan for rows of these lengths. Shapes: [rows] or [rows, 2], see `Task`."""
    return BatchPlan(lengths, settings.batch_tokens, settings.seed)


def count_steps(plan: BatchPlan, settings: TrainConfig, world_size: int) -> int:
    """Returns the number of optimizer steps of the whole run."""
    if settings.max_steps is not None:
        return settings.max_steps
    per_step = world_size * settings.accumulation
    return max(1, round(plan.batches_per_epoch * settings.epochs / per_step))


def make_accelerator(settings: TrainConfig, run: Path) -> Accelerator:
    join_processes()  # first: it sets how long processes wait for distillation
    precision, on_gpu = settings.precision, PartialState().device.type == "cuda"
    if precision == "auto":
        whole = on_gpu and not parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
        precision = "bf16" if whole else "fp32"
    accelerator = Accelerator(
        mixed_precision="bf16" if precision == "bf16" else "no",
        log_with=list(settings.trackers) or None,
        project_dir=str(run),
    )
    if accelerator.device.type == "cpu":
        count, source = choose_threads(settings.threads)
        torch.set_num_threads(count)
        accelerator.print(f"CPU threads of each process: {count} ({source})")
        if precision == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            accelerator.print(
                "train.precision=bf16 is several times slower than fp32 here: this processor has "
                "no products of bfloat16; start again with train.precision=fp32"
            )
    check_sharding(accelerator, settings)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        unset_hf_deepspeed_config()  # else Transformers shards every model, the target too
    return accelerator


def train(accelerator: Accelerator, task: Task, settings: TrainConfig, run: Path) -> None:
    """Trains to the end, from the newest checkpoint of `run` if there is one; loads the averaged
    weights into the objective's model. Raises Interrupted on SIGTERM or SIGINT, after writing a
    checkpoint."""
    prepared = prepare(accelerator, task, settings)
    plan, objective, optimizer = prepared.plan, prepared.objective, prepared.optimizer
    total = count_steps(plan, settings, accelerator.num_processes)
    fingerprint = _fingerprint(plan, settings, total, accelerator.num_processes)
    step = begun = 0
    if existing := checkpoint_folders(run):
        step = begun = load_checkpoint(accelerator, objective, existing[-1], fingerprint).step
        accelerator.print(f"resuming {run} at step {step} of {total}")
    log = MetricsLog(accelerator, run, step, settings)
    schedule = Schedule(settings.checkpoint_every, total, max(KEPT_CHECKPOINTS, settings.average))
    stop = StopSignal()
    parts, sums = task.objective.parts, None
    prints = accelerator.is_local_main_process
    shown: dict[str, float] = {}
    objective.train()
    if accelerator.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 unless it is bf16 anyway
    with stop, tracking(total, f"train {run.name}", "step", done=step, shown=prints) as work:
        batches = Waiting(batches_of(prepared, step, total))
        while step < total:
            rate = learning_rate(settings, step, total)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with advice_on_memory(settings, step):
                found = take_step(prepared, batches, progress=step / max(total - 1, 1))
            sums = found if sums is None else sums + found
            step += 1
            last = step == total
            if step % settings.log_every == 0 or last:
                rates = mean_rates(sums, parts)
                check_finite(rates, step, run)
                shown |= rates
                log.write(step, rates | {"learning_rate": rate})
                sums = None
            if task.validate is not None and (step % settings.validate_every == 0 or last):
                shown |= _validate(prepared, task, log, step)
            latest = ", ".join(f"{k} {v:.3f}" for k, v in shown.items() if "/" not in k)
            work.set_postfix_str(latest, refresh=False)
            work.update()
            stopping = stop.seen(accelerator)
            if step % settings.checkpoint_every == 0 or last or stopping:
                if sums is not None:
                    check_finite(mean_rates(sums, parts), step, run)
                where = Progress(step, accelerator.num_processes, fingerprint)
                save_checkpoint(accelerator, objective, run, where, schedule)
            if stopping and not last:
                raise Interrupted(
                    f"stopped at step {step} of {total}; its checkpoint is in {run}; run the "
                    "same command again to continue"
                )
    for line in closing_lines(step - begun, batches, shown.get("loss"), task.constant_loss):
        accelerator.print(line)
    if accelerator.is_main_process:
        weights = average_weights(schedule.due(checkpoint_folders(run))[-settings.average :])
        task.objective.model.load_state_dict(weights, strict=False)  # frozen weights are unchanged
    accelerator.wait_for_everyone()
    accelerator.end_training()


def closing_lines(
    steps: int, batches: Waiting, loss: float | None, best: float | None
) -> Iterator[str]:
    """Yields the final status lines of a run. best: `Task.constant_loss`."""
    if steps:
        seconds, waited = batches.seconds()
        rate = f"{counted(steps, 'step')} at {steps / seconds:.3g} a second"
        yield f"{rate}; waiting for batches took {waited / seconds:.1%}"
    if loss is not None and best is not None and loss >= best:
        yield (
            f"the loss, {loss:.3f}, is not below that of the best constant prediction, {best:.3f}: "
            "nothing was learned; use a lower train.learning_rate, a longer train.warmup or more "
            "steps"
        )


@contextlib.contextmanager
def advice_on_memory(settings: TrainConfig, steps: int) -> Iterator[None]:
    """Raises ConfigError if a step runs out of memory. steps: number of steps done before."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        smaller = max(1, settings.batch_tokens // 2)
        raise ConfigError(
            f"out of memory in step {steps + 1} with train.batch_tokens = {settings.batch_tokens}; "
            f"use train.batch_tokens={smaller} train.accumulation={2 * settings.accumulation} "
            "(free until the first checkpoint; after it give run=ANOTHER_FOLDER)"
        ) from error


def check_finite(rates: Mapping[str, float], step: int, run: Path) -> None:
    """Raises Diverged if a loss is not finite, before non-finite weights are saved."""
    if wrong := [name for name, rate in rates.items() if not math.isfinite(rate)]:
        raise Diverged(
            f"{wrong[0]} is {rates[wrong[0]]} at step {step}; use a lower train.learning_rate, a "
            f"longer train.warmup or train.precision=fp32, and run=ANOTHER_FOLDER if {run} has "
            "checkpoints"
        )


def learning_rate(settings: TrainConfig, step: int, total_steps: int) -> float:
    """Returns the learning rate of optimizer step number `step`, from 0.

    Linear warm-up (SpecDec: from 1e-7), then inverse square root, half a cosine to 0, or constant.
    """
    peak, warmup = settings.learning_rate, settings.warmup
    warmup = max(int(warmup if warmup >= 1 else warmup * total_steps), 1)
    if step < warmup:
        return 1e-7 + (peak - 1e-7) * (step + 1) / warmup
    if settings.schedule == "inverse-sqrt":
        return peak * math.sqrt(warmup / (step + 1))
    if settings.schedule == "cosine":
        done = (step + 1 - warmup) / max(total_steps - warmup, 1)
        return peak * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return peak


def prepare(accelerator: Accelerator, task: Task, settings: TrainConfig) -> Prepared:
    """Seeds all random numbers; creates batch plan and optimizer; prepares them with Accelerate.

    FSDP and DeepSpeed shard or convert the modules they are given. They get a copy, so that the
    task's objective stays unsharded, for validation and for the final weights.
    """
    plan = make_plan(task.lengths, settings)
    if text := plan.left_out():
        accelerator.print(text)
    set_seed(settings.seed)
    if is_sharded(accelerator):
        task = replace(task, objective=copy_to_shard(accelerator, settings, task.objective))
    else:
        task.objective.to(accelerator.device)
    if settings.compile:
        compile_layers(task.objective.model)
    objective, optimizer = accelerator.prepare(task.objective, make_optimizer(task, settings))
    return Prepared(accelerator, task, settings, plan, objective, optimizer)


def make_optimizer(task: Task, settings: TrainConfig) -> torch.optim.Optimizer:
    """Creates AdamW without weight decay for norms and biases."""
    trained = {name: p for name, p in task.objective.named_parameters() if p.requires_grad}
    plain = [name for name, p in trained.items() if p.ndim <= 1 or name.endswith("bias")]
    others = [trained[name] for name in plain]
    matrices = [p for name, p in trained.items() if name not in plain]
    groups = ((matrices, settings.weight_decay), (others, 0.0))
    return torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for params, decay in groups if params],
        lr=settings.learning_rate,
        betas=settings.adam_betas,
        eps=settings.adam_eps,
        fused=all(one.device.type == "cuda" for one in trained.values()) or None,
    )


def batches_of(prepared: Prepared, step: int, total: int) -> Iterator[tuple[int, Any]]:
    """Yields (batch number, batch) of this process for the steps from `step` to `total`. A batch
    depends only on (seed, epoch, row), so it is the same whichever worker makes it."""
    accelerator, task, per_step = prepared.accelerator, prepared.task, prepared.batches_per_step
    first = step * per_step + accelerator.process_index
    numbers = range(first, total * per_step, accelerator.num_processes)
    on_gpu, workers = accelerator.device.type == "cuda", prepared.settings.workers
    if task.in_process or workers is None:
        workers = 2 if on_gpu and not task.in_process else 0
    loader = DataLoader(
        task.rows,
        batch_sampler=prepared.plan.stream(numbers),
        collate_fn=task.collate,
        num_workers=workers,
        multiprocessing_context="fork" if workers and "fork" in get_all_start_methods() else None,
        worker_init_fn=leave_signals,
        pin_memory=on_gpu,  # page-locked memory is copied to a GPU asynchronously
    )
    for number, batch in zip(numbers, loader, strict=True):
        yield number, batch.to(accelerator.device)


def take_step(prepared: Prepared, batches: Iterator[tuple[int, Any]], progress: float) -> Tensor:
    """Runs one optimizer step; returns the global sums of loss, weight, correct and counted, on the
    device, without synchronising it.

    The gradient of each batch is divided by the first batch's global weight. This is exact if a
    step is one batch; with accumulation, gradients are rescaled to the whole step's weight at the
    end. Shapes: -> [4], or [4, parts].
    """
    accelerator, task, settings = prepared.accelerator, prepared.task, prepared.settings
    objective, optimizer = prepared.objective, prepared.optimizer
    totals: Tensor | float = 0.0
    reference = None
    for index in range(settings.accumulation):
        number, batch = next(batches)
        if task.complete is not None:
            batch = task.complete(batch)
        torch.manual_seed(mixed_seed(settings.seed, number))
        last = index == settings.accumulation - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(objective):
            sums: LossSums = objective(batch, progress)
            own = torch.stack([value.detach().double() for value in sums])
            gathered = accelerator.reduce(own, reduction="sum")
            if reference is None:
                reference = gathered[1].clamp(min=1e-9)
            scale = (accelerator.num_processes / reference).float()
            accelerator.backward((sums.loss * scale).sum())
        totals = totals + gathered
    parts = [objective] if task.objective.parts is None else task.objective.parts.values()
    if settings.accumulation > 1:
        factors = (reference / totals[1].clamp(min=1e-9)).float().reshape(len(parts))
        for part, factor in zip(parts, factors, strict=True):
            for parameter in part.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
    if settings.clip is not None:
        for part in parts:
            accelerator.clip_grad_norm_(part.parameters(), settings.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return totals


def _validate(prepared: Prepared, task: Task, log: MetricsLog, step: int) -> dict[str, float]:
    """Runs the task's validation on the main process, with unsharded weights; the others wait."""
    accelerator = prepared.accelerator
    module = whole_objective(accelerator, prepared.objective, task.objective)
    values: dict[str, float] = {}
    if accelerator.is_main_process:
        with torch.no_grad():
            values = task.validate(module.eval())
        module.train()
    log.write(step, values)
    accelerator.wait_for_everyone()
    return values


def _fingerprint(plan: BatchPlan, settings: TrainConfig, total: int, world: int) -> str:
    """Returns a hash of everything that determines what the next step computes."""
    decisive = settings.model_dump(mode="json", exclude=LOOSE | {"average", "epochs", "max_steps"})
    text = json.dumps([decisive, total, world, *plan.lengths.shape, int(plan.lengths.sum())])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
