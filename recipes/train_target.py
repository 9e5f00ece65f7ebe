"""Train a small language model from scratch, for demos and tests: a target, or a drafter for one.

    accelerate launch recipes/train_target.py --config recipes/docstrings_target.yaml
    accelerate launch recipes/train_target.py --config recipes/functions_target.yaml
    accelerate launch recipes/train_target.py --config recipes/functions_drafter.yaml

Encoder-decoder families learn to map the input to the reference; decoder-only families learn both
as one text. A drafter gets its target as the `teacher` and learns the target's distribution at each
position, which acceptance depends on, instead of the reference's tokens. Targets that you serve
need no training: use them unchanged, and train a drafter on their own answers
(recipes/train_causal_drafter.py).
"""

from __future__ import annotations

from functools import partial

from drafttrain.commands.options import DryRun
from drafttrain.commands.shell import recipe_command
from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import VALIDATION_ROWS, TargetRecipe
from drafttrain.data.batches.examples import Examples, PairCollator
from drafttrain.data.distill.recipe_rows import count_tokens, row_lengths
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.inputs.rows import describe_inputs, usable
from drafttrain.data.inputs.tokens import tokenize_texts
from drafttrain.models.language_models import family_defaults, random_model
from drafttrain.models.loading import check_target, load_target, load_tokenizer, outline_target
from drafttrain.training.loop import Task, count_steps, make_plan
from drafttrain.training.losses import constant_loss
from drafttrain.training.objectives.language_modelling import LanguageModelling
from drafttrain.training.recipe import already_finished, begin_run, train_and_save
from drafttrain.training.run_folder import check_run

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SPECIAL = ["<pad>", "</s>", "<unk>", "<mask>"]
"""Tokens 0 to 3 of a tokenizer trained here; the decoder start token is <pad>."""


def train_tokenizer(texts: list[str], vocab_size: int, pairs: bool) -> PreTrainedTokenizerFast:
    """Trains a BPE tokenizer.

    For pairs: on NFKC text with the Metaspace marker; each text ends with </s>. Else: byte-level
    with single digits; it adds no special tokens, so that a prompt can be continued.
    """
    alphabet: list[str] = []
    if pairs:
        bpe = Tokenizer(models.BPE(unk_token="<unk>"))
        bpe.normalizer = normalizers.NFKC()
        parts = [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("isolated")]
        bpe.decoder = decoders.Metaspace()
        bpe.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    else:
        bpe = Tokenizer(models.BPE())
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
        bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(parts)
    sizes = {"vocab_size": vocab_size, "min_frequency": 2, "show_progress": False}
    kept = {"special_tokens": SPECIAL, "initial_alphabet": alphabet}
    bpe.train_from_iterator(texts, trainers.BpeTrainer(**sizes, **kept))
    roles = ("pad_token", "eos_token", "unk_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **dict(zip(roles, SPECIAL, strict=True)))


@torch.no_grad()
def perplexity(
    objective: LanguageModelling, rows: datasets.Dataset, collate: PairCollator
) -> dict[str, float]:
    """Per-token perplexity and accuracy on held-out rows, without label smoothing; with a teacher
    also the mean probability that it accepts a token drawn from the model."""
    sums, accepted = torch.zeros(4, dtype=torch.float64), 0.0
    smoothing, objective.label_smoothing = objective.label_smoothing, 0.0
    for start in range(0, len(rows), 32):
        chunk = rows[start : start + 32]
        pairs = zip(chunk["source_ids"], chunk["target_ids"], strict=True)
        batch = collate([(0, 0, *pair) for pair in pairs]).to(objective.model.device)
        sums += torch.stack([value.double().cpu() for value in objective(batch, 1.0)])
        if objective.teacher is not None:
            accepted += float(objective.acceptance(batch).sum())
    objective.label_smoothing = smoothing
    loss, weight, correct, counted = sums.tolist()
    values = {"perplexity": float(np.exp(loss / weight)), "held_out_accuracy": correct / counted}
    return values | ({"acceptance": accepted / counted} if objective.teacher is not None else {})


@recipe_command(TargetRecipe, "recipes/docstrings_target.yaml")
def main(settings: TargetRecipe, dry_run: DryRun = False) -> None:
    if already_finished(settings):
        return
    pairs = family_defaults(settings.model).is_encoder_decoder
    check_teacher(settings, pairs)
    check_run(settings.run, settings)
    inputs = usable(load_inputs(settings.data))
    if settings.teacher is not None:
        tokenizer = load_tokenizer(settings.teacher)
    else:
        texts = list(inputs["source"]) + [text for text in inputs["reference"] if text is not None]
        tokenizer = train_tokenizer(texts, settings.vocab_size, pairs)
    tokenize = partial(tokenize_rows, tokenizer=tokenizer, most=settings.max_tokens, pairs=pairs)
    rows, held_out = tokenize(settings.data.path, inputs), None
    if settings.held_out is not None:
        others = usable(load_inputs(settings.held_out, "held_out"))
        others = tokenize(settings.held_out.path, others)
        held_out = others.select(range(min(VALIDATION_ROWS, len(others))))
    model = build_model(settings, tokenizer, pairs)
    load = outline_target if dry_run else load_target
    teacher = None if settings.teacher is None else load(settings.teacher).model
    task = make_task(settings, model, teacher, rows, held_out)
    accelerator = Accelerator() if dry_run else begin_run(settings)
    plan = make_plan(task.lengths, settings.train)
    accelerator.print(f"{settings.data.path}: {describe_inputs(inputs)}")
    accelerator.print(
        f"{model.num_parameters():,} parameters, {len(rows):,} of {len(inputs):,} rows, "
        f"{task.lengths.sum():,} tokens, {plan.batches_per_epoch} batches an epoch, "
        f"{count_steps(plan, settings.train, accelerator.num_processes)} steps"
    )
    if not dry_run:
        train_and_save(accelerator, settings, task, tokenizer)


def tokenize_rows(
    path: str, rows: datasets.Dataset, tokenizer, most: int, pairs: bool
) -> datasets.Dataset:
    """Tokenises rows to source_ids and target_ids, without rows of more than `most` tokens.

    The limit holds for each side of a pair, or for both parts of a text together. A text's target
    ends with EOS. Pairs without references are left out. Raises ConfigError if no row is left.
    """
    if pairs:
        rows = rows.filter(lambda row: row["reference"] is not None)
    if len(rows) == 0:
        raise ConfigError(
            "the data has no references to learn from; name their column with "
            "data.reference_column, or their file with data.reference_path"
        )
    if pairs:
        targets = tokenizer(text_target=list(rows["reference"])).input_ids
    else:
        parts = tokenizer([text or "" for text in rows["reference"]], add_special_tokens=False)
        targets = [[*ids, tokenizer.eos_token_id] for ids in parts.input_ids]
    sources = tokenize_texts(tokenizer, rows["source"][:], not pairs)
    tokenized = datasets.Dataset.from_dict({"source_ids": sources, "target_ids": targets})
    size = max if pairs else sum
    short = tokenized.filter(lambda row: size(map(len, row.values())) <= most)
    if len(short) == 0:
        raise ConfigError(f"max_tokens = {most} leaves no row of {path!r}; give a larger one")
    return short


def make_task(
    settings: TargetRecipe,
    model: PreTrainedModel,
    teacher: PreTrainedModel | None,
    rows: datasets.Dataset,
    held_out: datasets.Dataset | None,
) -> Task:
    pairs = model.config.is_encoder_decoder
    collate = PairCollator(model.config.pad_token_id or 0, joined=not pairs)
    objective = LanguageModelling(model, settings.label_smoothing, teacher)
    validate = None if held_out is None else partial(perplexity, rows=held_out, collate=collate)
    constant = None
    if teacher is None:
        learned = ["target_ids"] if pairs else ["source_ids", "target_ids"]
        counts = count_tokens(rows, learned, model.config.vocab_size)
        constant = constant_loss(counts, settings.label_smoothing)
    lengths = row_lengths(rows).sum(axis=1)
    return Task(objective, Examples(rows), lengths, collate, validate, constant_loss=constant)


def check_teacher(settings: TargetRecipe, pairs: bool) -> None:
    """Checks that the teacher is of the trained model's kind. Raises ConfigError."""
    given = settings.teacher
    if given is not None and check_target(given).is_encoder_decoder != pairs:
        other = "decoder-only" if pairs else "an encoder-decoder"
        raise ConfigError(
            f"teacher.path = {given.path!r} is {other}, unlike model.model_type = "
            f"{settings.model['model_type']!r}; give a model_type of the teacher's kind"
        )


def build_model(settings: TargetRecipe, tokenizer, pairs: bool) -> PreTrainedModel:
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    size, ends = len(tokenizer), {"eos_token_id": eos, "bos_token_id": None}
    given = {"vocab_size": size, "pad_token_id": pad} | ends
    if pairs:
        given |= {"decoder_start_token_id": pad, "forced_eos_token_id": None}
    if settings.model["model_type"] == "marian":
        given["decoder_vocab_size"] = size
    torch.manual_seed(settings.train.seed)
    kind = AutoModelForSeq2SeqLM if pairs else AutoModelForCausalLM
    return random_model(kind, settings.model, given)


if __name__ == "__main__":
    main()
