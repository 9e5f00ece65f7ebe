"""Train a small language model that drafts for a decoder-only target.

    accelerate launch recipes/train_causal_drafter.py --config recipes/smollm2_drafter.yaml
    accelerate launch recipes/train_causal_drafter.py --config recipes/smollm2_drafter.yaml \\
        target.path=MODEL data.path=prompts.jsonl run=checkpoints/mine \\
        "initialise.layers=[0,1,28,29]"
    accelerate launch recipes/train_causal_drafter.py --config recipes/smollm2_drafter.yaml \\
        initialise.path=SMALL_MODEL objective.forward_kl=0 objective.total_variation=1
    accelerate launch recipes/train_causal_drafter.py --config recipes/smollm2_parallel.yaml

The drafter is initialised from some of the target's layers or from another model with the same
tokens. It learns the tokens of the target's answers, or the target's distribution at each of them
(teacher.kind=cached computes it once). With drafter.drafts=blocks it also learns to fill in masks
after each prefix (PARD), and final/ has `pard_token` in its config.json. final/ holds the trained
Transformers model, start/ the initial one, which drafts token by token. Missing distilled outputs
are made first. Running the same command again continues a stopped run.
"""

from __future__ import annotations

from functools import partial

from drafttrain.commands.options import DryRun
from drafttrain.commands.shell import recipe_command
from drafttrain.config.recipes import CausalDrafterRecipe
from drafttrain.data.batches.examples import Example, Examples
from drafttrain.data.batches.masked_blocks import BlocksCollator
from drafttrain.data.batches.packing import share_sequences
from drafttrain.data.distill.recipe_rows import (
    check_positions,
    choose_mask,
    frequent_tokens,
    row_lengths,
)
from drafttrain.data.teacher import training_examples
from drafttrain.decoding.drafters.causal import greedy_blocks
from drafttrain.decoding.engine.architectures import check_configuration
from drafttrain.evaluation.teacher_forced import BlockDrafts, BlockValidation, slot_validation
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


@recipe_command(CausalDrafterRecipe, "recipes/smollm2_drafter.yaml")
def main(settings: CausalDrafterRecipe, dry_run: DryRun = False) -> None:
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
    keep_start(accelerator, settings, drafter, target.tokenizer)
    if settings.drafter.drafts == "blocks":
        own = getattr(planned.config, "pard_token", None)
        mask = choose_mask(own, target.tokenizer, size, rows)
        drafter.config.pard_token, drafter.config.k = mask, settings.drafter.k
        accelerator.print(f"mask: token {mask}, {target.tokenizer.convert_ids_to_tokens(mask)!r}")
    freeze(drafter, settings.objective.frozen)
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    accelerator.print(f"{drafter.num_parameters():,} parameters, {trained:,} of them trained")
    task = make_task(settings, drafter, rows, held_out, target)
    train_and_save(accelerator, settings, task, target.tokenizer)


def make_task(
    settings: CausalDrafterRecipe,
    drafter: PreTrainedModel,
    rows: datasets.Dataset,
    held_out: datasets.Dataset | None,
    target: LoadedTarget,
) -> Task:
    draftable = draftable_tokens(drafter.config, drafter.config.vocab_size)
    objective = FollowTarget(drafter, settings.objective, target.model, draftable)
    examples = training_examples(settings, rows, target, draftable)
    pad, k = target.tokenizer.pad_token_id or 0, settings.drafter.k
    if settings.drafter.drafts == "blocks":
        collate = BlocksCollator(pad, drafter.config.pard_token, k)
        validate = None if held_out is None else slot_validation(Examples(held_out), collate)
        return blocks_task(settings, objective, examples, collate, validate)
    collate = BlocksCollator(pad)
    lengths = row_lengths(rows).sum(axis=1) - 1  # an output's last token is never an input
    most = settings.objective.packed_tokens
    packed, lengths = share_sequences(examples, lengths, most, range(len(rows)))
    draft, alone = partial(draft_along, collate, k), collate.alone
    validate = None if held_out is None else BlockValidation(Examples(held_out), alone, draft)
    return Task(objective, packed, lengths, collate, validate)


def draft_along(
    collate: BlocksCollator, k: int, objective: FollowTarget, row: Example
) -> BlockDrafts:
    """Greedy drafts of k tokens at each prefix of a row's output, and the acceptance probability
    of sampled draft tokens."""
    batch = collate.alone([row]).to(objective.model.device)
    logits, _ = objective.rows(batch)
    best = objective.tokens(logits.argmax(-1))
    return BlockDrafts(greedy_blocks(best, len(best), k), objective.overlap(batch, logits))


if __name__ == "__main__":
    main()
