"""How sure the slots of a block drafter ought to be: a temperature for each, by known outputs.

A tree's nodes are scored by how likely the target is believed to go there, so a slot whose rows are
less sure than it is right gets too many siblings, and one that is surer too few. The temperature
that makes the output's own tokens likeliest mends that (temperature scaling, Guo et al. 2017).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from drafttrain.decoding.sampling import exact_enough
from drafttrain.models.spec_drafter.model import UNDRAFTED

COOLEST, HOTTEST = 0.1, 4.0
"""Between these it is sought: a slot that is always right would have none."""
ROWS_ENOUGH = 400
"""Rows of a slot that it is fitted to."""


def fit_slot_temperatures(blocks: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """The temperature of each slot's rows under which the tokens of outputs are likeliest.

    Outputs are read until every slot has rows enough, or none is left; a slot that is reached by
    none has the temperature of the one before it. Tokens that cannot be drafted count nothing.
    blocks: of each output the rows behind its own tokens at every prefix [L, K, V], before
    temperature, and its tokens [L].
    """
    rows: list[list[Tensor]] = []
    labels: list[list[Tensor]] = []
    for logits, output in blocks:
        for slot in range(logits.shape[1]):
            if slot == len(rows):
                rows.append([])
                labels.append([])
            own, tokens = logits[: max(len(output) - slot, 0), slot].cpu(), output[slot:].cpu()
            draftable = own.gather(1, tokens[:, None])[:, 0] > UNDRAFTED
            rows[slot].append(own[draftable])
            labels[slot].append(tokens[draftable])
        if all(sum(map(len, own)) >= ROWS_ENOUGH for own in rows):
            break
    found: list[float] = []
    for own, tokens in zip(rows, labels, strict=True):
        known = torch.cat(own)[:ROWS_ENOUGH], torch.cat(tokens)[:ROWS_ENOUGH]
        found.append(_likeliest(*known) if len(known[1]) else (found or [1.0])[-1])
    return found


def _likeliest(rows: Tensor, labels: Tensor) -> float:
    """The temperature under which rows [N, V] make tokens [N] likeliest, to two places."""
    rows = exact_enough(rows)

    def surprise(log_temperature: float) -> float:
        log_probs = (rows / math.exp(log_temperature)).log_softmax(-1)
        return -float(log_probs.gather(1, labels[:, None]).mean())

    bounds = (math.log(COOLEST), math.log(HOTTEST))
    best = minimize_scalar(surprise, bounds=bounds, method="bounded", options={"xatol": 0.01})
    return round(math.exp(best.x), 2)
