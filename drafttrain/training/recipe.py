"""Functions shared by recipes: start of a run, checks, plans, saving, and tasks with blocks."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from drafttrain.config.base import ConfigError, counted
from drafttrain.config.commands import DistillConfig
from drafttrain.config.recipes import (
    CausalDrafterRecipe,
    DistillingRecipe,
    HeadRecipe,
    Recipe,
    StateDrafterRecipe,
    TargetRecipe,
    TrainConfig,
)
from drafttrain.data.batches.examples import Examples
from drafttrain.data.batches.masked_blocks import BlocksCollator, lengths_with_masks
from drafttrain.data.batches.packing import share_sequences
from drafttrain.data.distill.plan import check_distillation, plan_distillation, sampled_lengths
from drafttrain.data.distill.recipe_rows import (
    distillations,
    distilled_rows,
    row_lengths,
    rows_with_labels,
)
from drafttrain.data.inputs.clips import AUDIO
from drafttrain.data.inputs.rows import usable
from drafttrain.data.shards.outputs import input_keys
from drafttrain.data.shards.writing import say
from drafttrain.models.loading import LoadedTarget, load_target
from drafttrain.training.checkpoints import KEPT_CHECKPOINTS
from drafttrain.training.loop import Task, count_steps, make_accelerator, make_plan, train
from drafttrain.training.objective import Objective
from drafttrain.training.objectives.follow_target import FollowTarget
from drafttrain.training.run_folder import check_run, open_run, save_final

SHARED = 0.5
"""Maximal share of held-out inputs that may also be training inputs."""
BlocksRecipe = CausalDrafterRecipe | StateDrafterRecipe
KeptRecipe = BlocksRecipe | TargetRecipe
"""Recipes with a setting for the dtype of the saved model."""


Started = tuple[Accelerator, LoadedTarget, datasets.Dataset, datasets.Dataset | None]
"""A started run of a recipe that distils: its target, distilled rows and held-out rows."""


def start_run(settings: DistillingRecipe) -> Started | None:
    """Opens the run's folder, loads the target, distils what is missing, and seeds; returns None if
    the run is finished. Raises ConfigError."""
    if already_finished(settings):
        return None
    accelerator = begin_run(settings, distillations(settings))
    target = load_target(settings.target)
    rows, held_out = distilled_rows(settings, target)
    torch.manual_seed(settings.train.seed)
    return accelerator, target, rows, held_out


def already_finished(settings: Recipe) -> bool:
    """Returns whether `final/` exists, and prints it if so. Raises ConfigError if it was made with
    other settings, e.g. more steps."""
    run, final = settings.run, settings.run / "final"
    finished = (final / "config.json").is_file() or any(final.glob("*/config.json"))
    if finished:
        check_run(run, settings)
        print(f"{run} is finished; see {final}")
    return finished


def begin_run(
    settings: DistillingRecipe | TargetRecipe, wanted: Mapping[str, DistillConfig] | None = None
) -> Accelerator:
    """Runs all checks, joins the launch's processes and opens the run's folder.

    wanted: the run's distillations, by the setting of their inputs. Raises ConfigError, before
    anything is written.
    """
    check_run(settings.run, settings)
    for name in settings.train.trackers:
        if find_spec(name) is None:
            raise ConfigError(
                f"train.trackers has {name!r}, which is not installed; install it, or leave it out"
            )
    training, shared = set(), 0
    for group, distillation in (wanted or {}).items():
        inputs = check_distillation(distillation, group)
        keys = input_keys(usable(inputs))
        shared = check_apart(settings.data.path, training, group, keys)
        training.update(keys)
        texts = AUDIO not in inputs.column_names and not isinstance(settings, HeadRecipe)
        if group == "data" and texts:
            check_lengths(sampled_lengths(distillation, inputs)[1], settings.train)
    accelerator = make_accelerator(settings.train, settings.run)
    if accelerator.is_main_process:
        if shared:
            say(f"the training data hold {counted(shared, 'held-out input')} too")
        open_run(settings.run, settings)
    accelerator.wait_for_everyone()
    return accelerator


def check_apart(path: str, training: Collection[str], group: str, held_out: Sequence[str]) -> int:
    """Counts held-out inputs that are also training inputs, by `input_keys`; path: of the latter,
    for the message. Raises ConfigError if their share exceeds SHARED."""
    twice = sum(text in training for text in held_out)
    if twice > SHARED * len(held_out):
        raise ConfigError(
            f"{twice} of {len(held_out)} inputs of {group} are inputs of data.path = {path!r} too, "
            f"which may be learned by heart; give others, or skip those ({group}.skip)"
        )
    return twice


def check_lengths(sources: Sequence[int], settings: TrainConfig) -> None:
    """Raises ConfigError if most rows exceed train.batch_tokens even with an output of one token;
    called before the target decodes anything."""
    longer = sorted(length + 1 for length in sources if length + 1 > settings.batch_tokens)
    if 2 * len(longer) > len(sources):
        raise ConfigError(
            f"train.batch_tokens = {settings.batch_tokens}, but most rows of data have more, up to "
            f"{longer[-1]} tokens with the first of their outputs; give a larger one"
        )


def keep_start(
    accelerator: Accelerator,
    settings: KeptRecipe,
    drafter: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Writes `start/` once: the drafter before its first training step, for comparison."""
    if accelerator.is_main_process and not (settings.run / "start").exists():
        kept = copy.deepcopy(drafter).to(getattr(torch, settings.save_dtype))
        save_final(settings.run, kept, tokenizer, "start")


def train_and_save(
    accelerator: Accelerator, settings: KeptRecipe, task: Task, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Trains a model to the end and writes `final/` in settings.save_dtype."""
    train(accelerator, task, settings.train, settings.run)
    if accelerator.is_main_process:
        model = task.objective.model.cpu().to(getattr(torch, settings.save_dtype))
        print(f"saved {save_final(settings.run, model, tokenizer)}")


def blocks_task(
    settings: BlocksRecipe,
    objective: FollowTarget,
    rows: Examples,
    collate: BlocksCollator,
    validate: Callable[[Objective], dict[str, float]] | None,
) -> Task:
    """Creates the task of training on packed rows with blocks, dropped as the settings say; the
    given `collate` keeps all blocks."""
    own, k = settings.objective, settings.drafter.k
    lengths = lengths_with_masks(row_lengths(rows.rows), k, own.kept, own.kept_floor)
    labelled = rows_with_labels(rows.rows, collate.reads_prompt)
    drops = replace(collate, kept=own.kept, floor=own.kept_floor, seed=settings.train.seed)
    packed, lengths = share_sequences(rows, lengths, own.packed_tokens, labelled)
    return Task(objective, packed, lengths, drops, validate)


def print_plan(settings: DistillingRecipe, drafter: nn.Module, more_tokens: int = 0) -> None:
    """Prints a run's distillation, sizes, steps, disk and memory. more_tokens: tokens of each row
    besides source and output; computed for recipes with blocks, from the mean output length."""
    plan = plan_distillation(distillations(settings)["data"])
    causal = isinstance(settings, CausalDrafterRecipe)
    if isinstance(settings, StateDrafterRecipe) or (causal and settings.drafter.drafts == "blocks"):
        own, output = settings.objective, plan.target_tokens // max(plan.rows, 1)
        lengths = np.array([[1, output]])
        columns = lengths_with_masks(lengths, settings.drafter.k, own.kept, own.kept_floor)
        more_tokens = int(columns[0]) - output
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    print(f"drafter      {parameters:,} parameters")
    print(f"distillation {plan.text}")
    tokens = plan.source_tokens + plan.target_tokens + more_tokens * plan.rows
    print_steps(parameters, plan.rows, tokens, settings.train)


def print_steps(parameters: int, rows: int, tokens: int, settings: TrainConfig) -> None:
    """Prints batches, steps, disk and memory, estimated for rows of equal length.

    tokens: total of all rows, as batches count them.
    """
    plan = make_plan(np.full(rows, max(1, tokens // max(rows, 1))), settings)
    checkpoints, mib = max(KEPT_CHECKPOINTS, settings.average), 2**20
    disk = (checkpoints * 12 + 4) * parameters  # weights and two Adam moments each; final/
    world = Accelerator().num_processes
    steps = count_steps(plan, settings, world)
    print(f"batches      {plan.batches_per_epoch:,} an epoch of {settings.batch_tokens:,} tokens")
    print(f"steps        {steps:,}; batches per step: {settings.accumulation * world}")
    print(f"disk         {disk / mib:,.0f} MiB for {counted(checkpoints, 'checkpoint')}")
    print(f"memory       {16 * parameters / mib:,.0f} MiB for weights, gradients and optimizer")
