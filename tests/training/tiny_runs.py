"""Tiny training runs: tasks, settings, how to stop them and how to read their logs."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
import numpy as np
import torch
from torch import nn

from drafttrain.config.recipes import ObjectiveConfig, TrainConfig
from drafttrain.data.batches.examples import Batch, Example, Examples
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.training.loop import Task, make_accelerator, train
from drafttrain.training.objectives.mask_predict import MaskPredict
from tests.tiny_drafters import collator, small_drafter

SIX_STEPS = TrainConfig(
    max_steps=6,
    threads=1,
    batch_tokens=120,
    learning_rate=1e-3,
    warmup=2,
    checkpoint_every=2,
    validate_every=3,
    log_every=1,
)


def small_task(
    validate: Callable[[object], dict[str, float]] | None = None, **shape: float
) -> Task:
    """Returns the training of a small drafter on twelve sentences."""
    rows = [{"source_ids": s, "target_ids": t} for _, _, s, t in examples(12)]
    drafter = slot_drafter(**shape).float()
    lengths = np.array([len(r["source_ids"]) + len(r["target_ids"]) for r in rows]) + 6
    collate = collator(drafter, 2)
    objective = MaskPredict(drafter, ObjectiveConfig())
    return Task(objective, Examples(datasets.Dataset.from_list(rows)), lengths, collate, validate)


def train_small(task: Task, settings: TrainConfig, run: Path) -> dict[str, torch.Tensor]:
    """Trains to the end and returns the final weights."""
    run.mkdir(parents=True, exist_ok=True)
    train(make_accelerator(settings, run), task, settings, run)
    return {name: value.clone() for name, value in task.objective.model.state_dict().items()}


def slot_drafter(**changes) -> SpecDrafter:
    """Returns the small drafter to train, with token ids below 20."""
    return small_drafter(20, 24, **{"k": 4, "decoder_layers": 2, "ffn": 32} | changes)


def examples(count: int = 6) -> list[tuple[int, int, list[int], list[int]]]:
    random = torch.Generator().manual_seed(0)

    def sentence(length: int) -> list[int]:
        return [*torch.randint(2, 20, (length,), generator=random).tolist(), 1]

    return [(0, row, sentence(4), sentence(3 + row)) for row in range(count)]


def numbered(rows: Sequence[tuple[list[int], list[int]]]) -> list[Example]:
    """Returns rows of source and target tokens as examples of epoch 0, numbered from 0."""
    return [Example(0, row, source, target) for row, (source, target) in enumerate(rows)]


def learn(objective: nn.Module, batch: Batch, steps: int, rate: float) -> list[float]:
    """Trains an objective on one batch by Adam; returns the loss of each step."""
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.Adam(trained, rate), []
    for step in range(steps):
        sums = objective(batch, step / (steps - 1))
        loss = sums.loss / sums.weight.clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def logged(run: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def stop_at(step: int):
    """Returns a validation that sends SIGTERM to this process, which then stops after the step."""

    def validate(_) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    return validate
