"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math

from drafttrain.config.recipes import TrainConfig


def learning_rate(settings: TrainConfig, step: int, total_steps: int) -> float:
    """Rate of optimizer step number `step`, counted from 0.

    Linear warm-up (SpecDec: from 1e-7), then inverse square root, half a cosine to 0, or constant.
    """
    warmup = settings.warmup if settings.warmup >= 1 else settings.warmup * total_steps
    warmup = max(int(warmup), 1)
    if step < warmup:
        return 1e-7 + (settings.learning_rate - 1e-7) * (step + 1) / warmup
    if settings.schedule == "inverse-sqrt":
        return settings.learning_rate * math.sqrt(warmup / (step + 1))
    if settings.schedule == "cosine":
        done = (step + 1 - warmup) / max(total_steps - warmup, 1)
        return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return settings.learning_rate
