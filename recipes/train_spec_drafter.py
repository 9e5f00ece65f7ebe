"""Distil a target into a Spec-Drafter (SpecDec, Xia et al. 2023).

    accelerate launch recipes/train_spec_drafter.py
    accelerate launch recipes/train_spec_drafter.py --config recipes/multi30k_en_de.yaml \\
        target.path=MODEL data.path=train.en run=checkpoints/mine

Without arguments it trains the quickstart (recipes/quickstart.yaml) on embedded data. Missing
distilled outputs are made first. Running the same command again continues a stopped run.
"""

from __future__ import annotations

from dataclasses import replace

from drafttrain.commands.options import DryRun
from drafttrain.commands.shell import recipe_command
from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import SpecDrafterRecipe
from drafttrain.data.batches.examples import Example, Examples
from drafttrain.data.batches.slots import SlotCollator
from drafttrain.data.distill.recipe_rows import (
    count_tokens,
    distillations,
    frequent_tokens,
    row_lengths,
)
from drafttrain.data.encoded import batch_encoding, clip_encoding, text_encoding
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.decoding.drafters.teacher_forced_blocks import block_rows
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.teacher_forcing import check_projection
from drafttrain.evaluation.teacher_forced import BlockDrafts, BlockValidation
from drafttrain.models.drafters import reads_states, vocabulary_size
from drafttrain.models.identity import hash_target
from drafttrain.models.loading import LoadedTarget, check_target, load_tokenizer
from drafttrain.models.spec_drafter.build import build, empty_drafter, make_config
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.models.spec_drafter.shape import mark, shape_of
from drafttrain.models.speech import takes_audio
from drafttrain.training.loop import Task, train
from drafttrain.training.losses import constant_loss
from drafttrain.training.objectives.mask_predict import MaskPredict
from drafttrain.training.recipe import print_plan, start_run
from drafttrain.training.run_folder import save_final

import datasets
import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase


@recipe_command(SpecDrafterRecipe, "recipes/quickstart.yaml")
def main(settings: SpecDrafterRecipe, dry_run: DryRun = False) -> None:
    target_config = check_target(settings.target)
    tokenizer = load_tokenizer(settings.target)
    mask_id = choose_mask(tokenizer, target_config)
    try:
        config = make_config(target_config, settings.drafter, mask_id, settings.target.recorded())
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if shape_of(config).bidirectional and settings.objective.blocks != 1:
        raise ConfigError(
            f"objective.blocks = {settings.objective.blocks}, but a bidirectional prefix attends "
            "to its one block; set objective.blocks=1 or drafter.prefix_attention=causal"
        )
    if dry_run:
        with torch.device("meta"):
            drafter = empty_drafter(config)
        print_plan(settings, drafter, settings.objective.blocks * drafter.shape.masks(config.k))
        return
    run = start_run(settings)
    if run is None:
        return
    accelerator, target, rows, held_out = run
    drafter, copied = make_drafter(settings, config, target, rows)
    trained = [name for name, one in drafter.named_parameters() if one.requires_grad]
    new = [name for name in trained if name not in copied]
    started = f"{len(copied)} copied from the target, {len(new)} new: {', '.join(new) or 'none'}"
    accelerator.print(f"{drafter.num_parameters():,} parameters; {started}")
    if (tokens := config.draftable_tokens) is not None:
        accelerator.print(f"{len(tokens):,} of {drafter.shape.vocab_size:,} tokens can be drafted")
    task = make_task(settings, drafter, rows, held_out, target)
    del target, run  # frees the target, unless the task keeps it
    train(accelerator, task, settings.train, settings.run)
    if accelerator.is_main_process:
        print(f"saved {save_final(settings.run, drafter.cpu(), tokenizer)}")


def make_drafter(
    settings: SpecDrafterRecipe,
    config: PretrainedConfig,
    target: LoadedTarget,
    rows: datasets.Dataset,
) -> tuple[SpecDrafter, list[str]]:
    """Makes the initial drafter; also returns the names of parameters copied from the target."""
    drafter = settings.drafter
    try:
        CachedModel(target.model).check_tree_attention()
        scale = check_projection(target.model)
    except ValueError as error:
        raise ConfigError(f"target.path = {settings.target.path!r}: {error}") from None
    mark(config, replace(shape_of(config), logit_scale=scale))
    if drafter.output_tokens is not None:
        size = None if drafter.output_tokens == "used" else drafter.output_tokens
        vocabulary, ends = shape_of(config).vocab_size, config.eos_token_id
        config.draftable_tokens = frequent_tokens(rows, size, vocabulary, ends)
    if reads_states(config):
        config.target["weights_sha256"] = hash_target(target.model)
        config.target["takes_audio"] = takes_audio(target.model.config)
    made, copied = build(config, target.model, drafter.initialise)
    if settings.objective.freeze_embeddings:
        for part in (made.embed_tokens, made.get_input_embeddings(), made.get_output_embeddings()):
            part.requires_grad_(False)
    return made, copied


def choose_mask(tokenizer: PreTrainedTokenizerBase, target: PretrainedConfig) -> int | None:
    """Returns the tokenizer's mask token, else an unused id of the vocabulary, else None (the
    drafter then gets one more embedding)."""
    mask, size = tokenizer.mask_token_id, vocabulary_size(target)
    if mask is not None and mask != tokenizer.unk_token_id and mask < size:
        return mask
    return len(tokenizer) if len(tokenizer) < size else None


def make_task(
    settings: SpecDrafterRecipe,
    drafter: SpecDrafter,
    rows: datasets.Dataset,
    held_out: datasets.Dataset | None,
    target: LoadedTarget,
) -> Task:
    """Makes the training task, which keeps the target only if training runs it."""
    config, blocks = drafter.config, settings.objective.blocks
    start, pad = config.decoder_start_token_id, config.pad_token_id or 0
    collate = SlotCollator(drafter.shape, config.k, blocks, settings.train.seed, start, pad)
    validate = None
    if held_out is not None:
        held_out_examples = examples_for(settings, drafter, held_out, "held_out", target)
        validate = BlockValidation(held_out_examples, collate, blocks_along)
    reads_encoder = drafter.shape.encoder == "target"
    texts = reads_encoder and not takes_audio(target.model.config)
    # worker processes make batches of texts, this process encodes them
    examples = Examples(rows) if texts else examples_for(settings, drafter, rows, "data", target)
    counts = count_tokens(rows, ["target_ids"], drafter.shape.vocab_size)
    return Task(
        MaskPredict(drafter, settings.objective),
        examples,
        row_lengths(rows) + [0, blocks * drafter.shape.masks(config.k)],
        collate,
        validate,
        complete=batch_encoding(target) if texts else None,
        in_process=reads_encoder and not texts,
        constant_loss=constant_loss(counts, settings.objective.label_smoothing),
    )


def examples_for(
    settings: SpecDrafterRecipe,
    drafter: SpecDrafter,
    rows: datasets.Dataset,
    group: str,
    target: LoadedTarget,
) -> Examples:
    """Returns the distilled rows of a group of inputs, with the target's encoder states if the
    drafter reads them."""
    if drafter.shape.encoder == "own":
        return Examples(rows)
    if not takes_audio(target.model.config):
        return Examples(rows, text_encoding(target))
    distillation = distillations(settings)[group]
    clips = load_inputs(distillation.data, audio=True)
    return Examples(rows, clip_encoding(target, rows, clips, distillation.out))


def blocks_along(objective: MaskPredict, example: Example) -> BlockDrafts:
    """Greedy blocks at each prefix of an output, for validation."""
    source = torch.tensor(example.source_ids) if example.encoded is None else example.encoded
    output = torch.tensor(example.target_ids)
    rows = block_rows(objective.model, source, output, example.given_ids)
    return BlockDrafts(rows.argmax(-1).cpu())


if __name__ == "__main__":
    main()
