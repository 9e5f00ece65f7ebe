"""Train a shallow decoder that shares its Whisper's encoder (Distil-Whisper, Gandhi et al. 2023).

    accelerate launch recipes/train_shallow_decoder.py --config recipes/whisper_decoder.yaml
    accelerate launch recipes/train_shallow_decoder.py --config recipes/whisper_decoder.yaml \\
        target.path=MODEL data.path=clips.jsonl run=checkpoints/mine

It starts from evenly spaced layers of the target's decoder, learns on the target's own transcripts,
and drafts token by token from what the target's encoder put out. final/ is a `WhisperForCausalLM`,
which Transformers' assisted generation takes as it is. Missing distilled outputs are made first.
Running the same command again goes on where it was stopped.
"""

from __future__ import annotations

import datasets
import torch
from torch import Tensor
from transformers import PretrainedConfig, WhisperForCausalLM

from drafttrain.commands.distill import checked, open_decoder
from drafttrain.commands.options import DryRun
from drafttrain.commands.shell import recipe_command
from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import ShallowDecoderRecipe
from drafttrain.data.batches.examples import Example
from drafttrain.data.batches.heard import HeardCollator
from drafttrain.data.distill.plan import plan_distillation
from drafttrain.data.distill.recipe_rows import distillations, distilled_rows, row_lengths
from drafttrain.data.encoded import encoded_bytes, heard_examples
from drafttrain.decoding.drafters.causal import blocks_of
from drafttrain.decoding.engine.speech import start_of_transcript
from drafttrain.evaluation.teacher_forced import BlockValidation
from drafttrain.models.loading import LoadedTarget, check_target, load_target
from drafttrain.models.shallow_decoder import copy_decoder, freeze, shallow_config
from drafttrain.models.speech import hears
from drafttrain.training.loop import Task, train
from drafttrain.training.objectives.follow_decoder import FollowDecoder
from drafttrain.training.recipe import already_finished, begin_run, print_training
from drafttrain.training.run_folder import save_final


@recipe_command(ShallowDecoderRecipe, "recipes/whisper_decoder.yaml")
def main(settings: ShallowDecoderRecipe, dry_run: DryRun = False) -> None:
    target_config = check_target(settings.target)
    config = make_config(settings, target_config)
    if dry_run:
        print_plan(settings, config, target_config)
        return
    if already_finished(settings.run):
        return
    accelerator = begin_run(settings, checked(distillations(settings)))
    target = load_target(settings.target)
    rows, held_out = distilled_rows(settings, target, open_decoder)
    drafter = copy_decoder(target.model, config)
    freeze(drafter, settings.objective.frozen)
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    accelerator.print(f"{drafter.num_parameters():,} parameters, {trained:,} of them trained")
    task = make_task(settings, drafter, rows, held_out, target)
    train(accelerator, task, settings.train, settings.run)
    if accelerator.is_main_process:
        print(f"saved {save_final(settings.run, drafter.cpu(), target.tokenizer)}")


def make_config(settings: ShallowDecoderRecipe, target: PretrainedConfig) -> PretrainedConfig:
    """The drafter's config.json, from the target's. Raises ConfigError for a target that it cannot
    be trained for."""
    if not hears(target):
        raise ConfigError(
            f"target.path = {settings.target.path!r} is a {target.model_type!r} model, but shallow "
            "decoders are trained for Whisper alone; for texts use recipes/train_spec_drafter.py"
        )
    identity = {"path": settings.target.path, "revision": settings.target.revision}
    try:
        return shallow_config(target, settings.drafter.decoder_layers, identity)
    except ValueError as error:
        raise ConfigError(f"drafter.decoder_layers: {error}") from None


def make_task(
    settings: ShallowDecoderRecipe,
    drafter: WhisperForCausalLM,
    rows: datasets.Dataset,
    held_out: datasets.Dataset | None,
    target: LoadedTarget,
) -> Task:
    folder = settings.encoded or settings.run / "encoded"
    collate = HeardCollator(start_of_transcript(target.model.generation_config))
    objective = FollowDecoder(drafter, target.model, settings.objective.target_weight)
    validate = None
    if held_out is not None:
        k = settings.drafter.k

        def drafts(objective: FollowDecoder, example: Example) -> Tensor:
            logits, _ = objective.rows(collate([example]).to(drafter.device))
            return blocks_of(logits.argmax(-1), len(logits), k)

        own = heard_examples(target, held_out, settings.held_out, folder)
        validate = BlockValidation(own, collate, drafts)
    examples = heard_examples(target, rows, settings.data, folder)
    return Task(objective, examples, row_lengths(rows).sum(axis=1), collate, validate)


def print_plan(
    settings: ShallowDecoderRecipe, config: PretrainedConfig, target: PretrainedConfig
) -> None:
    """What a run would do, without loading weights or writing anything."""
    with torch.device("meta"):
        drafter = WhisperForCausalLM(config)
    plan = plan_distillation(checked(distillations(settings))["data"])
    print_training(plan, settings.train, drafter)
    disk = encoded_bytes(plan.rows, target) / 2**20
    print(f"encoded      {disk:,.0f} MiB for what the target's encoder makes of the clips")


if __name__ == "__main__":
    main()
