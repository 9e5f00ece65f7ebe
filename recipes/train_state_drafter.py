"""Train a drafter that reads its target's hidden states: a decoder-only target's Spec-Drafter.

    accelerate launch recipes/train_state_drafter.py --config recipes/smollm2_states.yaml
    accelerate launch recipes/train_state_drafter.py --config recipes/smollm2_states.yaml \\
        target.path=MODEL data.path=prompts.jsonl run=checkpoints/mine drafter.k=6
    accelerate launch recipes/train_state_drafter.py --config recipes/smollm2_states.yaml \\
        run=checkpoints/mine "drafter.layers=[29]" --dry-run

The drafter is a copy of a few of the target's last layers. It reads the target's keys and values of
the verified prefix and the target's hidden states at the last token, and drafts a block in one
forward pass. start/ is fitted to the target by least squares, without a training step; final/ is
trained on the target's distributions along its own answers. Missing distilled outputs are made
first. Running the same command again continues a stopped run.
"""

from __future__ import annotations

from collections.abc import Iterator

from drafttrain.commands.options import DryRun
from drafttrain.commands.shell import recipe_command
from drafttrain.config.progress import tracking
from drafttrain.config.recipes import StateDrafterRecipe
from drafttrain.data.batches.examples import Examples
from drafttrain.data.batches.masked_blocks import BlocksCollator
from drafttrain.data.distill.recipe_rows import frequent_tokens, rows_with_labels
from drafttrain.decoding.engine.architectures import check_states
from drafttrain.evaluation.teacher_forced import slot_validation
from drafttrain.models.draftable import draftable_tokens
from drafttrain.models.identity import hash_target
from drafttrain.models.loading import LoadedTarget
from drafttrain.models.state_drafter import StateDrafter, check_state_recipe, copy_layers, fit_start
from drafttrain.training.loop import Task
from drafttrain.training.objectives.follow_states import FollowStates
from drafttrain.training.recipe import (
    blocks_task,
    keep_start,
    print_plan,
    start_run,
    train_and_save,
)

import datasets
import numpy as np
import torch

FITTED_TOKENS = 60_000
"""Output tokens used to fit the initial input maps."""


@recipe_command(StateDrafterRecipe, "recipes/smollm2_states.yaml")
def main(settings: StateDrafterRecipe, dry_run: DryRun = False) -> None:
    target_config, config = check_state_recipe(settings)
    check_states(target_config)
    if dry_run:
        with torch.device("meta"):
            print_plan(settings, StateDrafter(config))
        return
    run = start_run(settings)
    if run is None:
        return
    accelerator, target, rows, held_out = run
    labelled = rows_with_labels(rows, reads_prompt=False)
    ends = target.model.generation_config.eos_token_id
    if (count := settings.drafter.output_tokens) is not None:
        config.draftable_tokens = frequent_tokens(rows, count, config.vocab_size, ends)
    config.target |= {"weights_sha256": hash_target(target.model)}
    drafter = StateDrafter(config)
    copy_layers(drafter, target.model)
    texts, shown = list(random_texts(rows, labelled)), accelerator.is_main_process
    fitted = fit_start(drafter, target.model, tracking(texts, "fit", "text", shown=shown))
    keep_start(accelerator, settings, drafter, target.tokenizer)
    size = f"{drafter.num_parameters():,} parameters"
    accelerator.print(f"{size}; maps fitted along {fitted:,} tokens")
    task = make_task(settings, drafter, rows, held_out, target)
    train_and_save(accelerator, settings, task, target.tokenizer)


def random_texts(
    rows: datasets.Dataset, labelled: np.ndarray
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields random (prompt, output) without replacement, until outputs have FITTED_TOKENS."""
    order, tokens = torch.randperm(len(labelled), generator=torch.Generator().manual_seed(1)), 0
    for index in order.tolist():
        row = rows[int(labelled[index])]
        yield row["source_ids"], row["target_ids"]
        tokens += len(row["target_ids"])
        if tokens >= FITTED_TOKENS:
            return


def make_task(
    settings: StateDrafterRecipe,
    drafter: StateDrafter,
    rows: datasets.Dataset,
    held_out: datasets.Dataset | None,
    target: LoadedTarget,
) -> Task:
    draftable = draftable_tokens(drafter.config, drafter.config.vocab_size)
    objective = FollowStates(drafter, settings.objective, target.model, draftable)
    # slots do not read a mask's embedding, so any id will do as mask token
    pad, k = target.tokenizer.pad_token_id or 0, settings.drafter.k
    collate = BlocksCollator(pad, mask_token=0, k=k, reads_prompt=False)
    validate = None if held_out is None else slot_validation(Examples(held_out), collate)
    return blocks_task(settings, objective, Examples(rows), collate, validate)


if __name__ == "__main__":
    main()
