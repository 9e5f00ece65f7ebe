"""Train a language model that drafts a block in one pass for a decoder-only target (PARD).

    accelerate launch recipes/train_parallel_drafter.py --config recipes/smollm2_parallel.yaml
    accelerate launch recipes/train_parallel_drafter.py --config recipes/smollm2_parallel.yaml \\
        target.path=MODEL data.path=prompts.jsonl run=checkpoints/mine drafter.k=4
    accelerate launch recipes/train_parallel_drafter.py --config recipes/smollm2_parallel.yaml \\
        initialise.path=checkpoints/smollm2-drafter

The drafter is initialised as in recipes/train_causal_drafter.py, preferably from a drafter trained
by that recipe, and learns to fill in masks after each prefix of the target's own answers. final/ is
a Transformers language model with `pard_token` in its config.json; start/ drafts token by token.
Missing distilled outputs are made first. Running the same command again continues a stopped run.
"""

from __future__ import annotations

from drafttrain.commands.options import DryRun
from drafttrain.commands.shell import recipe_command
from drafttrain.config.recipes import ParallelDrafterRecipe
from drafttrain.data.batches.examples import Examples
from drafttrain.data.batches.masked_blocks import BlocksCollator
from drafttrain.data.distill.recipe_rows import check_positions, choose_mask, frequent_tokens
from drafttrain.data.teacher import training_examples
from drafttrain.decoding.engine.architectures import check_configuration
from drafttrain.evaluation.teacher_forced import slot_validation
from drafttrain.models.causal_drafter import (
    check_causal_recipe,
    draftable_tokens,
    empty_drafter,
    freeze,
    start_drafter,
)
from drafttrain.models.loading import LoadedTarget
from drafttrain.training.loop import Task
from drafttrain.training.objectives.follow_target import FollowTarget
from drafttrain.training.recipe import (
    blocks_task,
    keep_start,
    print_plan,
    start_run,
    train_and_save,
)

import datasets
import torch
from transformers import PreTrainedModel


@recipe_command(ParallelDrafterRecipe, "recipes/smollm2_parallel.yaml")
def main(settings: ParallelDrafterRecipe, dry_run: DryRun = False) -> None:
    target_config = check_causal_recipe(settings)
    check_configuration(target_config)
    with torch.device("meta"):
        planned = empty_drafter(settings, target_config)
    if dry_run:
        print_plan(settings, planned)
        return
    run = start_run(settings)
    if run is None:
        return
    accelerator, target, rows, held_out = run
    drafter = start_drafter(settings, target.model)
    check_positions(drafter.config, rows)
    size, ends = drafter.config.vocab_size, drafter.generation_config.eos_token_id
    if (count := settings.drafter.output_tokens) is not None:
        drafter.config.draftable_tokens = frequent_tokens(rows, count, size, ends)
    trained = getattr(planned.config, "pard_token", None)
    mask = choose_mask(trained, target.tokenizer, size, rows)
    keep_start(accelerator, settings, drafter, target.tokenizer)
    drafter.config.pard_token, drafter.config.k = mask, settings.drafter.k
    freeze(drafter, settings.objective.frozen)
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    accelerator.print(f"{drafter.num_parameters():,} parameters, {trained:,} of them trained")
    accelerator.print(f"mask: token {mask}, {target.tokenizer.convert_ids_to_tokens(mask)!r}")
    task = make_task(settings, drafter, rows, held_out, target)
    train_and_save(accelerator, settings, task, target.tokenizer)


def make_task(
    settings: ParallelDrafterRecipe,
    drafter: PreTrainedModel,
    rows: datasets.Dataset,
    held_out: datasets.Dataset | None,
    target: LoadedTarget,
) -> Task:
    draftable = draftable_tokens(drafter.config, drafter.config.vocab_size)
    objective = FollowTarget(drafter, settings.objective, target.model, draftable)
    examples = training_examples(settings, rows, target, draftable)
    collate = BlocksCollator(
        pad_token_id=target.tokenizer.pad_token_id or 0,
        mask_token=drafter.config.pard_token,
        k=settings.drafter.k,
    )
    validate = None if held_out is None else slot_validation(Examples(held_out), collate)
    return blocks_task(settings, objective, examples, collate, validate)


if __name__ == "__main__":
    main()
