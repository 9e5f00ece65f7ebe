"""What a language model's drafts are worth in servers, from one pass along each output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from drafttrain.decoding.drafters.causal import rows_along
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import own_source
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.types import Source
from drafttrain.evaluation.bootstrap import Array, Estimate, Ratio, estimate_ratio
from drafttrain.evaluation.forced.rounds import Expected, expect_rounds
from drafttrain.evaluation.report import ServedRun
from drafttrain.evaluation.served.rules import RULES, Rows, confidence, rules_for
from drafttrain.evaluation.served.synthetic import synthetic_settings
from drafttrain.evaluation.stops.chain_trace import TraceOptions, draft_limits, judge


@dataclass(frozen=True)
class Along:
    """One output, judged by every rule."""

    coins: dict[str, Array]
    """[L] by rule."""
    rates: dict[str, Array]
    """[L] by rule; 0 where nothing can be drafted."""
    confidence: Array
    """[L]."""
    limit: Array
    """[L] most tokens that a draft from each position may have."""


@torch.inference_mode()
def judge_along(
    target: CachedModel,
    drafter: CachedModel,
    source: Source,
    output: Sequence[int],
    options: TraceOptions,
    target_probs: Tensor | None = None,
) -> Along:
    """Rows of both models along an output of the target, and what each rule says of them.

    target_probs [L, V]: the target's, where they are known (`judge`).
    """
    tokens = torch.as_tensor(output, dtype=torch.long)
    logits = rows_along(drafter, source, tokens)
    known = len(logits)
    own = own_source(source, drafter.model)
    most = drafter.position_limit
    limit = draft_limits(target, most, source, len(own.prefix), len(output), options)
    if target_probs is None:
        target_probs = judge(target, source, tokens.to(source.prefix.device), options)
    rows = Rows(target_probs[:known].cpu(), warp(logits, options.sampling).cpu(), tokens[:known])
    rules, draftable = rules_for(options.sampling.greedy), limit > 0

    def whole(values: Tensor) -> Array:
        return np.pad(values.double().numpy(), (0, len(output) - known)) * draftable

    return Along(
        {rule.name: whole(rule.coins(rows)) for rule in rules},
        {rule.name: whole(rule.rates(rows)) for rule in rules},
        whole(confidence(logits).cpu()),
        limit,
    )


def served_runs(
    drafter: str,
    along: Sequence[Along],
    lengths: Sequence[int],
    p_min: Sequence[float],
    resamples: Array,
) -> list[ServedRun]:
    """Every rule at every draft length, and at every p-min where llama.cpp has one."""
    runs = []
    for rule, k, least in product(RULES, sorted(set(lengths)), sorted({0.0, *p_min})):
        if rule.name not in along[0].coins or (least and not rule.p_min):
            continue
        coins = [one.coins[rule.name] for one in along]
        counts = [
            expect_rounds(own, one.limit, k, one.confidence, least)
            for own, one in zip(coins, along, strict=True)
        ]
        runs.append(_served_run(drafter, rule.name, k, least, along, counts, resamples))
    return runs


def _served_run(
    drafter: str,
    rule: str,
    k: int,
    p_min: float,
    along: Sequence[Along],
    counts: Sequence[Expected],
    resamples: Array,
) -> ServedRun:
    drafts = np.array([one.num_drafts for one in counts])
    steps = np.array([one.num_steps for one in counts])
    accepted = np.array([one.num_accepted_tokens for one in counts])
    by_position = np.stack([one.num_accepted_tokens_per_pos for one in counts])
    ratios = {
        "token_acceptance_rate": Ratio(
            np.array([one.rates[rule].sum() for one in along]),
            np.array([float((one.limit > 0).sum()) for one in along]),
        ),
        "mean_acceptance_length": Ratio(drafts + accepted, drafts),
        "tokens_per_step": Ratio(steps + accepted, steps),
    }
    drafted = [one.num_draft_tokens for one in counts if one.num_draft_tokens is not None]
    totals = {"num_steps": steps, "num_drafts": drafts, "num_accepted_tokens": accepted}
    if len(drafted) == len(counts):
        totals["num_draft_tokens"] = np.array(drafted)
        ratios["draft_acceptance_rate"] = Ratio(accepted, totals["num_draft_tokens"])
    estimates = {name: estimate_ratio(ratio, resamples) for name, ratio in ratios.items()}
    found = [estimate_ratio(Ratio(column, drafts), resamples) for column in by_position.T]
    rates = [one or Estimate(0.0, 0.0, 0.0) for one in found]
    synthetic = p_min == 0.0 and drafts.sum() > 0
    return ServedRun(
        drafter=drafter,
        rule=rule,
        k=k,
        p_min=p_min,
        metrics={name: one for name, one in estimates.items() if one is not None},
        per_position_acceptance_rates=rates,
        totals={name: float(values.sum()) for name, values in totals.items()},
        synthetic=synthetic_settings([rate.value for rate in rates]) if synthetic else {},
    )
