"""What tiny training runs are made of, and how they are stopped and read."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch

from drafttrain.models.spec_drafter.model import SpecDrafter, SpecDrafterConfig


def small_drafter(dropout: float = 0.0, **changes) -> SpecDrafter:
    torch.manual_seed(1)
    shape = {
        "vocab_size": 20,
        "d_model": 24,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "attention_heads": 2,
        "ffn_dim": 32,
        "k": 4,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "dropout": dropout,
    }
    return SpecDrafter(SpecDrafterConfig(**shape | changes)).double()


def examples(count: int = 6) -> list[tuple[int, int, list[int], list[int]]]:
    random = torch.Generator().manual_seed(0)

    def sentence(length: int) -> list[int]:
        return [*torch.randint(2, 20, (length,), generator=random).tolist(), 1]

    return [(0, row, sentence(4), sentence(3 + row)) for row in range(count)]


def logged(run: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def stop_at(step: int):
    """A validation that sends SIGTERM to this process: the step is finished, then it leaves."""

    def validate(_) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    return validate
