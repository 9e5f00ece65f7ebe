"""Train a small encoder-decoder target from scratch, for demos and tests.

    accelerate launch recipes/train_target.py --config recipes/docstrings_target.yaml

Not for targets that you serve: point drafttrain at those as they are.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import datasets
import numpy as np
import torch
import typer
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast

from drafttrain.cli import recipe_command
from drafttrain.config import ConfigError, TargetRecipe, load_settings
from drafttrain.data.collate import PairCollator, pad
from drafttrain.data.prompts import load_inputs
from drafttrain.training.loop import Task, count_steps, make_accelerator, make_plan, train
from drafttrain.training.objectives import SequenceToSequence
from drafttrain.training.run import is_finished, open_run, save_final

SPECIAL = ["<pad>", "</s>", "<unk>", "<mask>"]
"""Ids 0 to 3 of a tokenizer trained here; the decoder starts from <pad>."""


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A BPE over NFKC text with the Metaspace marker; every text ends with </s>."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.normalizer = normalizers.NFKC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("isolated")]
    )
    bpe.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, min_frequency=2, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
    )


def tokenize(rows: datasets.Dataset, tokenizer, most: int) -> datasets.Dataset:
    """source_ids and target_ids of the pairs with at most `most` tokens on either side."""
    if rows[0]["reference"] is None:
        raise ConfigError("data: no references found; give data.reference_column or reference_path")
    pairs = {
        "source_ids": tokenizer(list(rows["source"])).input_ids,
        "target_ids": tokenizer(text_target=list(rows["reference"])).input_ids,
    }
    tokenized = datasets.Dataset.from_dict(pairs)
    return tokenized.filter(lambda row: max(len(row["source_ids"]), len(row["target_ids"])) <= most)


@torch.no_grad()
def perplexity(objective: SequenceToSequence, rows: datasets.Dataset) -> dict[str, float]:
    """Per-token perplexity and accuracy on held-out pairs, without label smoothing."""
    device = objective.model.device
    total = count = correct = 0.0
    pad_id = objective.model.config.pad_token_id
    for start in range(0, len(rows), 64):
        chunk = rows[start : start + 64]
        ids, lengths = pad(chunk["source_ids"], pad_id)
        labels, _ = pad(chunk["target_ids"], -100)
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        logits = objective.model(
            input_ids=ids.to(device), attention_mask=mask.to(device), labels=labels.to(device)
        ).logits
        counted = labels != -100
        picked = logits.cpu()[counted]
        total += torch.nn.functional.cross_entropy(picked, labels[counted], reduction="sum").item()
        correct += (picked.argmax(-1) == labels[counted]).sum().item()
        count += counted.sum().item()
    return {"perplexity": float(np.exp(total / count)), "held_out_accuracy": correct / count}


@recipe_command
def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings")] = None,
    config: Annotated[Path, typer.Option(help="YAML settings")] = Path(
        "recipes/docstrings_target.yaml"
    ),
    dry_run: Annotated[bool, typer.Option(help="Print sizes and steps; write nothing")] = False,
) -> None:
    settings = load_settings(TargetRecipe, config, overrides or ())
    run = settings.run
    if is_finished(run):
        print(f"{run} is finished; see {run / 'final'}")
        return
    rows = load_inputs(settings.data)
    if settings.tokenizer is not None:
        tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer)
    else:
        texts = list(rows["source"]) + [text for text in rows["reference"] if text is not None]
        tokenizer = train_tokenizer(texts, settings.vocab_size)
    pairs = tokenize(rows, tokenizer, settings.max_tokens)
    model = _build(settings, tokenizer)
    lengths = np.array([len(r["source_ids"]) + len(r["target_ids"]) for r in pairs])
    validate = None
    if settings.held_out is not None:
        held_out = tokenize(load_inputs(settings.held_out), tokenizer, settings.max_tokens)
        held_out = held_out.select(range(min(settings.validation_rows, len(held_out))))
        validate = partial(perplexity, rows=held_out)
    objective = SequenceToSequence(model, settings.label_smoothing)
    collate = PairCollator(tokenizer.pad_token_id)
    task = Task(objective, pairs, lengths, collate, validate)
    accelerator = make_accelerator(settings.train, run)
    plan = make_plan(task, settings.train)
    accelerator.print(
        f"{model.num_parameters():,} parameters, {len(pairs):,} of {len(rows):,} pairs, "
        f"{plan.batches_per_epoch} batches an epoch, "
        f"{count_steps(plan, settings.train, accelerator.num_processes)} steps"
    )
    if dry_run:
        return
    if accelerator.is_main_process:
        open_run(run, settings)
    accelerator.wait_for_everyone()
    train(accelerator, task, settings.train, run)
    if accelerator.is_main_process:
        final = model.to(getattr(torch, settings.save_dtype))
        print(f"saved {save_final(run, final, tokenizer)}")


def _build(settings: TargetRecipe, tokenizer) -> AutoModelForSeq2SeqLM:
    fields = dict(settings.model)
    family = fields.pop("model_type", None)
    if family is None:
        raise ConfigError("model.model_type is missing; give one, such as marian, bart or t5")
    fields |= {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "forced_eos_token_id": None,
    }
    if family == "marian":
        fields["decoder_vocab_size"] = len(tokenizer)
    torch.manual_seed(settings.train.seed)
    try:
        return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **fields))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"model: {error}") from None


if __name__ == "__main__":
    main()
