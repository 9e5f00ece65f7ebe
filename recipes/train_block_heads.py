"""Train block heads on a frozen target (Blockwise Decoding, Stern et al. 2018).

    accelerate launch recipes/train_block_heads.py --config recipes/multi30k_block_heads.yaml
    accelerate launch recipes/train_block_heads.py --config recipes/gsm8k_block_heads.yaml \\
        target.path=MODEL data.path=train.jsonl run=checkpoints/mine

k - 1 feed-forward heads on the target's last hidden state each predict one later token of the
target's own output. Missing distilled outputs are made first. Running the same command again
continues a stopped run.
"""

from __future__ import annotations

from importlib.metadata import version

from drafttrain.commands.options import DryRun
from drafttrain.commands.shell import recipe_command
from drafttrain.config.recipes import BlockHeadsRecipe
from drafttrain.data.batches.block_rows import BlockRowsCollator
from drafttrain.data.batches.examples import Example, Examples
from drafttrain.data.distill.recipe_rows import row_lengths
from drafttrain.decoding.drafters.block_heads import predict_blocks
from drafttrain.evaluation.teacher_forced import BlockDrafts, BlockValidation
from drafttrain.models.block_heads import BlockHeads, BlockHeadsConfig
from drafttrain.models.draft_states import state_size
from drafttrain.models.identity import hash_target
from drafttrain.models.loading import check_target
from drafttrain.training.loop import Task, train
from drafttrain.training.objectives.predict_ahead import PredictAhead
from drafttrain.training.recipe import print_plan, start_run
from drafttrain.training.run_folder import save_final

import datasets
import torch
from transformers import PretrainedConfig, PreTrainedModel


@recipe_command(BlockHeadsRecipe, "recipes/multi30k_block_heads.yaml")
def main(settings: BlockHeadsRecipe, dry_run: DryRun = False) -> None:
    heads_config = make_config(settings, check_target(settings.target))
    if dry_run:
        with torch.device("meta"):
            print_plan(settings, BlockHeads(heads_config))
        return
    run = start_run(settings)
    if run is None:
        return
    accelerator, target, rows, held_out = run
    heads_config.target |= {"weights_sha256": hash_target(target.model)}
    heads = BlockHeads(heads_config)
    accelerator.print(f"{heads_config.heads} heads with {heads.num_parameters():,} parameters")
    task = make_task(settings, heads, target.model, rows, held_out)
    train(accelerator, task, settings.train, settings.run)
    if accelerator.is_main_process:
        print(f"saved {save_final(settings.run, heads.cpu(), target.tokenizer)}")


def make_config(settings: BlockHeadsRecipe, target: PretrainedConfig) -> BlockHeadsConfig:
    """Makes the config of the heads from the target's config.json only."""
    width = state_size(target, "token")
    text = target.get_text_config(decoder=True)
    return BlockHeadsConfig(
        k=settings.drafter.k,
        hidden_size=width,
        ffn_size=settings.drafter.ffn_size or width,
        vocab_size=text.vocab_size,
        target=settings.target.recorded(),
        drafttrain_version=version("drafttrain"),
        is_encoder_decoder=target.is_encoder_decoder,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )


def make_task(
    settings: BlockHeadsRecipe,
    heads: BlockHeads,
    target: PreTrainedModel,
    rows: datasets.Dataset,
    held_out: datasets.Dataset | None,
) -> Task:
    positions, seed = settings.objective.positions, settings.train.seed
    collate = BlockRowsCollator(heads.config.heads, positions, seed)

    def draft(objective: PredictAhead, example: Example) -> BlockDrafts:
        ids = map(torch.tensor, (example.source_ids, example.target_ids))
        return BlockDrafts(predict_blocks(objective.model, objective.teacher.model, *ids))

    validate = None if held_out is None else BlockValidation(Examples(held_out), collate, draft)
    lengths = row_lengths(rows).sum(axis=1)
    return Task(PredictAhead(heads, target), Examples(rows), lengths, collate, validate)


if __name__ == "__main__":
    main()
