"""Distil a target into a Spec-Drafter (SpecDec, Xia et al. 2023).

    accelerate launch recipes/train_spec_drafter.py
    accelerate launch recipes/train_spec_drafter.py --config recipes/multi30k_en_de.yaml \\
        target.path=MODEL data.path=train.en run=checkpoints/mine

Without arguments it trains on the embedded default (recipes/quickstart.yaml). Missing distilled
outputs are made first. Running the same command again goes on where it was stopped.
"""

from __future__ import annotations

import datasets
import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from drafttrain.commands.distill import checked, open_decoder
from drafttrain.commands.options import DryRun
from drafttrain.commands.shell import recipe_command
from drafttrain.config.recipes import SpecDrafterRecipe
from drafttrain.data.batches.slots import SlotCollator
from drafttrain.data.distill.plan import plan_distillation
from drafttrain.data.distill.recipe_rows import distillations, distilled_rows, row_lengths
from drafttrain.decoding.drafters.block import predict_blocks
from drafttrain.evaluation.teacher_forced import BlockValidation
from drafttrain.models.loading import check_seq2seq, load_target, load_tokenizer
from drafttrain.models.spec_drafter.initialise import has_own_output, initialise, make_config
from drafttrain.models.spec_drafter.model import SpecDrafter, SpecDrafterConfig
from drafttrain.training.loop import Task, train
from drafttrain.training.objectives.mask_predict import MaskPredict
from drafttrain.training.recipe import already_finished, begin_run, print_training
from drafttrain.training.run_folder import save_final


@recipe_command(SpecDrafterRecipe, "recipes/quickstart.yaml")
def main(settings: SpecDrafterRecipe, dry_run: DryRun = False) -> None:
    target_config = check_seq2seq(settings.target)
    tokenizer = load_tokenizer(settings.target)
    mask_id = choose_mask(tokenizer, target_config)
    drafter_config = make_config(target_config, settings.drafter, mask_id, identity(settings))
    if dry_run:
        print_plan(settings, drafter_config)
        return
    if already_finished(settings.run):
        return
    accelerator = begin_run(settings, checked(distillations(settings)))
    target = load_target(settings.target)
    rows, held_out = distilled_rows(settings, target, open_decoder)
    torch.manual_seed(settings.train.seed)
    drafter_config.untied_output = has_own_output(target.model)
    drafter = SpecDrafter(drafter_config)
    account = initialise(drafter, target.model, settings.drafter.initialise)
    accelerator.print(f"{drafter.num_parameters():,} parameters; {account}")
    task = make_task(settings, drafter, rows, held_out, target.model)
    del target
    train(accelerator, task, settings.train, settings.run)
    if accelerator.is_main_process:
        print(f"saved {save_final(settings.run, drafter.cpu(), tokenizer)}")


def choose_mask(tokenizer: PreTrainedTokenizerBase, target: PretrainedConfig) -> int | None:
    """The tokenizer's mask token, else an unused id of the vocabulary, else None: a row more."""
    mask = tokenizer.mask_token_id
    if mask is not None and mask != tokenizer.unk_token_id and mask < target.vocab_size:
        return mask
    return len(tokenizer) if len(tokenizer) < target.vocab_size else None


def identity(settings: SpecDrafterRecipe) -> dict:
    """Which target the drafter is for, written to its config.json."""
    return {"path": settings.target.path, "revision": settings.target.revision}


def make_task(
    settings: SpecDrafterRecipe,
    drafter: SpecDrafter,
    rows: datasets.Dataset,
    held_out: datasets.Dataset | None,
    target: PreTrainedModel,
) -> Task:
    """The target is kept only where the objective looks at its distributions."""
    collate = SlotCollator(drafter.config, settings.objective.blocks, settings.train.seed)
    teacher = target if settings.objective.total_variation > 0 else None
    objective = MaskPredict(drafter, settings.objective, teacher)
    validate = None
    if held_out is not None:
        validate = BlockValidation(
            held_out, collate, lambda objective, *ids: predict_blocks(objective.model, *ids)
        )
    masks = settings.objective.blocks * drafter.config.mask_rows
    return Task(objective, rows, row_lengths(rows) + [0, masks], collate, validate)


def print_plan(settings: SpecDrafterRecipe, config: SpecDrafterConfig) -> None:
    """What a run would do, without loading weights or writing anything."""
    with torch.device("meta"):
        drafter = SpecDrafter(config)
    plan = plan_distillation(checked(distillations(settings))["data"])
    masks = settings.objective.blocks * config.mask_rows
    print_training(plan, settings.train, drafter, masks)


if __name__ == "__main__":
    main()
