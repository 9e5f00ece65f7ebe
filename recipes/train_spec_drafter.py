"""Distil a target into a Spec-Drafter (SpecDec, Xia et al. 2023).

    accelerate launch recipes/train_spec_drafter.py
    accelerate launch recipes/train_spec_drafter.py --config recipes/multi30k_en_de.yaml \\
        target.path=MODEL data.path=train.en run=checkpoints/mine

Without arguments it trains on the embedded default (recipes/quickstart.yaml). Missing distilled
outputs are made first. Running the same command again goes on where it was stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from drafttrain.commands.options import DryRun
from drafttrain.commands.shell import recipe_command
from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import DataConfig
from drafttrain.config.recipes import SpecDrafterRecipe
from drafttrain.data.batches.examples import Example, Examples
from drafttrain.data.batches.slots import SlotCollator
from drafttrain.data.distill.recipe_rows import (
    count_outputs,
    distillations,
    frequent_tokens,
    row_lengths,
)
from drafttrain.data.encoded import ClipEncoding, batch_encoding, text_encoding
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.decoding.drafters.block_along import block_rows
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.engine.teacher_forcing import states_before
from drafttrain.evaluation.teacher_forced import BlockValidation, Drafts, fit_slot_temperatures
from drafttrain.models.drafters import reads_states
from drafttrain.models.identity import hash_target
from drafttrain.models.loading import LoadedTarget, check_seq2seq, load_tokenizer
from drafttrain.models.spec_drafter.families import FAMILIES
from drafttrain.models.spec_drafter.initialise import initialise
from drafttrain.models.spec_drafter.model import SpecDrafter, SpecDrafterConfig
from drafttrain.models.spec_drafter.rows import PREFIX
from drafttrain.models.spec_drafter.shape import has_own_output, make_config
from drafttrain.models.spec_drafter.told import Fitted, fit_told
from drafttrain.models.speech import hears
from drafttrain.training.loop import Task, train
from drafttrain.training.losses import constant_loss
from drafttrain.training.objectives.mask_predict import MaskPredict
from drafttrain.training.recipe import Started, print_plan, start_run
from drafttrain.training.run_folder import save_final

import datasets
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

FITTED_TOKENS = 30_000
"""Of outputs, which the map of the target's states is fitted along."""
FITTED_AT_ONCE, FITTED_SEED = 32, 1


@recipe_command(SpecDrafterRecipe, "recipes/quickstart.yaml")
def main(settings: SpecDrafterRecipe, dry_run: DryRun = False) -> None:
    target_config = check_seq2seq(settings.target)
    tokenizer = load_tokenizer(settings.target)
    mask_id = choose_mask(tokenizer, target_config)
    identity = {"path": settings.target.path, "revision": settings.target.revision}
    drafter_config = make_config(target_config, settings.drafter, mask_id, identity)
    check_frozen(settings, drafter_config, target_config)
    if dry_run:
        plan_run(settings, drafter_config)
        return
    run = start_run(settings)
    if run is None:
        return
    accelerator, target, rows, held_out = run
    drafter, copied = make_drafter(settings, drafter_config, run)
    task = make_task(settings, drafter, rows, held_out, target)
    if settings.objective.copied_rate != 1.0:
        share = settings.objective.copied_rate
        task = replace(task, slowed={f"model.{name}": share for name in copied})
    if drafter_config.told_layer is not None:
        fitted = fit_told(drafter, target.model, first_outputs(task))
        accelerator.print(f"the map of the target's states fitted along {fitted:,} tokens")
    del target, run
    train(accelerator, task, settings.train, settings.run)
    if accelerator.is_main_process:
        drafter.cpu()
        if task.validate is not None and distillations(settings)["data"].method == "greedy":
            drafter.config.slot_temperatures = fit_slot_temperatures(known_blocks(task))
            print(f"temperatures of its slots, for trees: {drafter.config.slot_temperatures}")
        print(f"saved {save_final(settings.run, drafter, tokenizer)}")


def plan_run(settings: SpecDrafterRecipe, config: SpecDrafterConfig) -> None:
    """Print the plan, without loading weights or writing anything."""
    with torch.device("meta"):
        drafter = SpecDrafter(config)
    print_plan(settings, drafter, settings.objective.blocks * config.mask_rows)


def make_drafter(
    settings: SpecDrafterRecipe, config: SpecDrafterConfig, run: Started
) -> tuple[SpecDrafter, Collection[str]]:
    """The drafter at its start, and the names of the parameters copied from the target."""
    target = run.target
    config.untied_output = has_own_output(target.model)
    if settings.drafter.output_tokens == "used":
        used = frequent_tokens(run.rows, None, config.vocab_size, config.eos_token_id)
        config.output_tokens = len(used)
        run.accelerator.print(f"{len(used):,} of {config.vocab_size:,} tokens can be drafted")
    if reads_states(config):
        of_it = {"weights_sha256": hash_target(target.model), "hears": hears(target.model.config)}
        config.target |= of_it
    drafter = SpecDrafter(config)
    account = initialise(drafter, target.model, settings.drafter.initialise)
    run.accelerator.print(f"{drafter.num_parameters():,} parameters; {account}")
    if settings.objective.freeze_tokens:
        for name, parameter in drafter.named_parameters():  # slots' own weights are trained
            if name in account.loaded and ".slots." not in name:
                parameter.requires_grad_(False)
    return drafter, account.loaded


def choose_mask(tokenizer: PreTrainedTokenizerBase, target: PretrainedConfig) -> int | None:
    """The tokenizer's mask token, else an unused id of the vocabulary, else None: a row more."""
    mask = tokenizer.mask_token_id
    if mask is not None and mask != tokenizer.unk_token_id and mask < target.vocab_size:
        return mask
    return len(tokenizer) if len(tokenizer) < target.vocab_size else None


def make_task(
    settings: SpecDrafterRecipe,
    drafter: SpecDrafter,
    rows: datasets.Dataset,
    held_out: datasets.Dataset | None,
    target: LoadedTarget,
) -> Task:
    """The target is kept only where its distributions or its encoder are looked at."""
    config = drafter.config
    if (size := config.output_tokens) is not None:
        chosen = frequent_tokens(rows, size, config.vocab_size, config.eos_token_id)
        drafter.draftable.copy_(torch.tensor(chosen))
    texts = config.encoder == "target" and not hears(target.model.config)
    collate = SlotCollator(config, settings.objective.blocks, settings.train.seed)
    asked = settings.objective.total_variation > 0 or settings.drafter.target_states
    teacher = target.model if asked else None
    if settings.objective.freeze_embeddings:
        for shared in (drafter.embedding, drafter.output, drafter.logits_bias):
            if shared is not None:
                shared.requires_grad_(False)
    objective = MaskPredict(drafter, settings.objective, teacher)
    validate = None
    if held_out is not None:
        own = examples_for(settings, drafter.config, held_out, settings.held_out, target)
        validate = BlockValidation(own, collate, blocks_along)
    masks = settings.objective.blocks * drafter.config.mask_rows
    if texts:  # batches are made by other processes, encoded by this one
        examples, collate = Examples(rows), replace(collate, encoded=False)
    else:
        examples = examples_for(settings, drafter.config, rows, settings.data, target)
    return Task(
        objective,
        examples,
        row_lengths(rows) + [0, masks],
        collate,
        validate,
        complete=batch_encoding(target) if texts else None,
        in_process=config.encoder == "target" and not texts,
        constant_loss=constant_loss(
            count_outputs(rows, config.vocab_size), settings.objective.label_smoothing
        ),
    )


def first_outputs(task: Task) -> Iterator[Fitted]:
    """Outputs, drawn without replacement, until they have `FITTED_TOKENS` tokens."""
    left = FITTED_TOKENS
    generator = torch.Generator().manual_seed(FITTED_SEED)
    for chosen in torch.randperm(len(task.rows), generator=generator).split(FITTED_AT_ONCE):
        keys = [(0, row) for row in chosen.tolist()]
        batch = task.batch(keys, task.objective.model.device)
        lengths = (batch.layout.of_prefix(batch.layout.rows.block) == PREFIX).sum(1)
        tokens = task.objective.decoder_inputs(batch.targets)
        yield Fitted(batch.source, batch.attention_mask, tokens, lengths, batch.given)
        left -= int(lengths.sum())
        if left <= 0:
            return


def examples_for(
    settings: SpecDrafterRecipe,
    config: SpecDrafterConfig,
    rows: datasets.Dataset,
    data: DataConfig,
    target: LoadedTarget,
) -> Examples:
    """Distilled rows, with what the target's encoder makes of them where the drafter reads that.

    data: the inputs that they were distilled from.
    """
    if config.encoder == "own":
        return Examples(rows)
    if not hears(target.model.config):
        return Examples(rows, text_encoding(target))
    clips, folder = load_inputs(data, heard=True), settings.encoded or settings.run / "encoded"
    return Examples(rows, ClipEncoding(target, rows, clips, folder))


def blocks_along(objective: MaskPredict, example: Example) -> Drafts:
    """What validation compares with the output."""
    return Drafts(block_rows(objective.model, *what_is_known(objective, example)).argmax(-1).cpu())


def known_blocks(task: Task) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of blocks along held-out outputs, and the outputs."""
    objective = task.objective.eval()
    for row in range(len(task.validate.rows)):
        [example] = task.validate.rows.__getitems__([(0, row)])
        known = what_is_known(objective, example)
        yield block_rows(objective.model, *known), known[1]


def what_is_known(
    objective: MaskPredict, example: Example
) -> tuple[Tensor, Tensor, list[int], Tensor | None]:
    """Source, output, what was given of it, and the states that its tokens were predicted from,
    where the drafter is told them."""
    encoded, ids = example.encoded, torch.tensor(example.source_ids)
    output, before = torch.tensor(example.target_ids), None
    source = ids if encoded is None else encoded
    if objective.model.config.state_width is not None:
        teacher = objective.teacher.on(objective.model.device)
        read = make_source(example.source_ids, teacher, example.given_ids)
        before = states_before(teacher, [replace(read, encoded=encoded)], [example.target_ids])[0]
    return source, output, example.given_ids, before


def check_frozen(
    settings: SpecDrafterRecipe, config: SpecDrafterConfig, target: PretrainedConfig
) -> None:
    """Raises ConfigError for `objective.freeze_tokens` where tokens and slots cannot be told apart,
    or what tokens are multiplied with is not the target's, all of it."""
    if not settings.objective.freeze_tokens:
        return
    found = {"slot_weights": config.slot_weights, "encoder": config.encoder}
    found |= {"initialise": settings.drafter.initialise, "decoder_layers": config.decoder_layers}
    needed = {"slot_weights": "own", "encoder": "target", "initialise": "both"}
    needed["decoder_layers"] = getattr(target, FAMILIES[target.model_type].decoder_layers)
    for name, value in needed.items():
        if found[name] != value:
            raise ConfigError(
                f"objective.freeze_tokens keeps the target's weights for tokens, but drafter.{name}"
                f" = {found[name]!r}; set drafter.{name}={value}, or leave freeze_tokens out"
            )


if __name__ == "__main__":
    main()
