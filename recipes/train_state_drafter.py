"""Train a drafter behind its target's own states: a decoder-only target's Spec-Drafter.

    accelerate launch recipes/train_state_drafter.py --config recipes/smollm2_states.yaml
    accelerate launch recipes/train_state_drafter.py --config recipes/smollm2_states.yaml \\
        target.path=MODEL data.path=prompts.jsonl run=checkpoints/mine drafter.k=6
    accelerate launch recipes/train_state_drafter.py --config recipes/smollm2_states.yaml \\
        run=checkpoints/mine "drafter.layers=[29]" --dry-run

The deep part is the target: a few of its last layers are copied, read its keys and values of all
that is verified, and are fed what its hidden states say of the last token. One call drafts a block.
start/ is fitted to the target by least squares, without a step of training; final/ has learned the
target's rows along its own answers. Missing distilled outputs are made first. Running the same
command again goes on where it was stopped.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import datasets
import numpy as np
import torch

from drafttrain.commands.distill import checked, open_decoder
from drafttrain.commands.options import DryRun
from drafttrain.commands.shell import recipe_command
from drafttrain.config.language_recipes import StateDrafterRecipe
from drafttrain.config.progress import tracked
from drafttrain.data.batches.examples import Examples
from drafttrain.data.batches.masked_blocks import BlocksCollator, lengths_with_masks
from drafttrain.data.batches.packing import (
    PackedExamples,
    preview,
    sequence_lengths,
    sequences_of,
)
from drafttrain.data.distill.plan import plan_distillation
from drafttrain.data.distill.recipe_rows import (
    choose_draftable,
    distillations,
    distilled_rows,
    row_lengths,
    taught_rows,
)
from drafttrain.decoding.engine.architectures import check_states
from drafttrain.evaluation.teacher_forced import SlotValidation
from drafttrain.models.causal_drafter import draftable_tokens
from drafttrain.models.identity import hash_target
from drafttrain.models.loading import LoadedTarget, load_target
from drafttrain.models.state_drafter import (
    StateDrafter,
    StateDrafterConfig,
    copy_layers,
    fit_start,
)
from drafttrain.models.state_recipe import check_state_recipe
from drafttrain.training.loop import Task, train
from drafttrain.training.objectives.follow_states import FollowStates
from drafttrain.training.recipe import already_finished, begin_run, print_training
from drafttrain.training.run_folder import save_final, save_start

FITTED_SEED = 1
"""Of the order in which rows are taken for the start."""


@recipe_command(StateDrafterRecipe, "recipes/smollm2_states.yaml")
def main(settings: StateDrafterRecipe, dry_run: DryRun = False) -> None:
    target_config, config = check_state_recipe(settings)
    check_states(target_config)
    if dry_run:
        print_plan(settings, config)
        return
    if already_finished(settings.run):
        return
    accelerator = begin_run(settings, checked(distillations(settings)))
    target = load_target(settings.target)
    rows, held_out = distilled_rows(settings, target, open_decoder)
    taught = taught_rows(rows, reads_prompt=False)
    ends = target.model.generation_config.eos_token_id
    choose_draftable(config, settings.drafter.output_tokens, ends, rows)
    config.target |= {"weights_sha256": hash_target(target.model)}
    torch.manual_seed(settings.train.seed)
    drafter = StateDrafter(config)
    copy_layers(drafter, target.model)
    teacher = target
    if settings.reads_in not in (None, settings.target.dtype):
        teacher = load_target(settings.target.model_copy(update={"dtype": settings.reads_in}))
    texts = list(first_texts(rows, taught, settings.initialise.tokens))
    shown = accelerator.is_main_process
    fitted = fit_start(drafter, teacher.model, tracked(texts, "fit", "text", shown))
    kept = getattr(torch, settings.save_dtype)
    if accelerator.is_main_process:
        save_start(settings.run, copy.deepcopy(drafter).to(kept), target.tokenizer)
    accelerator.print(
        f"{drafter.num_parameters():,} parameters; maps fitted along {fitted:,} tokens"
    )
    accelerator.print(preview(rows[int(taught[0])], target.tokenizer))
    task = make_task(settings, drafter, rows, taught, held_out, teacher)
    train(accelerator, task, settings.train, settings.run)
    if accelerator.is_main_process:
        print(f"saved {save_final(settings.run, drafter.cpu().to(kept), target.tokenizer)}")


def first_texts(
    rows: datasets.Dataset, taught: np.ndarray, tokens: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts and outputs, drawn without replacement, until their outputs have so many tokens."""
    order = torch.randperm(len(taught), generator=torch.Generator().manual_seed(FITTED_SEED))
    for place in order.tolist():
        row = rows[int(taught[place])]
        yield row["source_ids"], row["target_ids"]
        tokens -= len(row["target_ids"])
        if tokens <= 0:
            return


def make_task(
    settings: StateDrafterRecipe,
    drafter: StateDrafter,
    rows: datasets.Dataset,
    taught: np.ndarray,
    held_out: datasets.Dataset | None,
    teacher: LoadedTarget,
) -> Task:
    objective, k = settings.objective, settings.drafter.k
    lengths = lengths_with_masks(row_lengths(rows), k, objective.kept, objective.kept_floor)
    sequences = sequences_of(lengths, objective.packed_tokens, taught)
    draftable = draftable_tokens(drafter.config, drafter.config.vocab_size)
    collate = BlocksCollator(
        pad_token_id=teacher.tokenizer.pad_token_id or 0,
        mask_token=0,  # what slots are fed is no token's embedding
        k=k,
        kept=objective.kept,
        floor=objective.kept_floor,
        seed=settings.train.seed,
        reads_prompt=False,
    )
    follow = FollowStates(drafter, objective, teacher.model, draftable)
    validate = None
    if held_out is not None:
        validate = SlotValidation(Examples(held_out), replace(collate, kept=1.0, floor=1.0))
    packed = PackedExamples(Examples(rows), sequences)
    return Task(follow, packed, sequence_lengths(lengths, sequences), collate, validate)


def print_plan(settings: StateDrafterRecipe, config: StateDrafterConfig) -> None:
    """What a run would do, without loading weights or writing anything."""
    with torch.device("meta"):
        drafter = StateDrafter(config)
    plan = plan_distillation(checked(distillations(settings))["data"])
    output, objective = plan.target_tokens // max(plan.rows, 1), settings.objective
    lengths, kept = np.array([[1, output]]), (objective.kept, objective.kept_floor)
    masks = int(lengths_with_masks(lengths, settings.drafter.k, *kept)[0]) - output
    print_training(plan, settings.train, drafter, more_tokens=masks)


if __name__ == "__main__":
    main()
