"""SpecDec++'s analyses: how well acceptance heads are calibrated, the oracle, and Theorem 3.1.

Labels are soft: the probability that a draft token is accepted, not whether it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import torch

from drafttrain.build.pairs import Pair
from drafttrain.config.decode import SamplingConfig
from drafttrain.config.kinds import KINDS, DrafterKind
from drafttrain.data.hidden.states import open_cache
from drafttrain.decoding.batching import run_single
from drafttrain.decoding.drafters.teacher_forced import read_outputs
from drafttrain.decoding.types import Sampling
from drafttrain.evaluation.bootstrap import Array
from drafttrain.evaluation.prompts import Prompt
from drafttrain.evaluation.runner import decode_by, plain_method
from drafttrain.models.acceptance_head import AcceptanceHead

BINS = 15
"""Bins of the calibration error and of the reliability diagram."""
ROWS = 200
"""Most held-out outputs that heads are judged on."""


@dataclass(frozen=True)
class Reliability:
    """Positions by predicted acceptance: mean prediction and mean label of each bin."""

    predicted: list[float]
    observed: list[float]
    positions: list[int]


@dataclass(frozen=True)
class HeadFacts:
    """How well a head predicts acceptance on held-out draft tokens."""

    name: str
    depth: int
    metrics: dict[str, float]
    """binary_kl, ece, auc, label_mean, predicted_mean."""
    reliability: Reliability


def judge_heads(heads: Mapping[str, AcceptanceHead], folder: Path) -> list[HeadFacts]:
    """Calibration of every head on cached held-out rows, best binary KL first.

    folder: a hidden cache of held-out outputs, its first mix. Raises ConfigError as `open_cache`.
    """
    cache = open_cache(folder)
    hidden, acceptance = cache.read(0, range(min(ROWS, len(cache.rows))))
    labels, found = acceptance.double().numpy(), []
    for name, head in heads.items():
        with torch.inference_mode():
            predicted = head.acceptance(hidden.to(head.device)).double().cpu().numpy()
        figures = {
            "binary_kl": float(binary_kl(labels, predicted).mean()),
            "ece": calibration_error(labels, predicted),
            "auc": area_under_curve(labels, predicted),
            "label_mean": float(labels.mean()),
            "predicted_mean": float(predicted.mean()),
        }
        known = {metric: value for metric, value in figures.items() if np.isfinite(value)}
        bins = reliability(labels, predicted)
        found.append(HeadFacts(name, head.config.depth, known, bins))
    return sorted(found, key=lambda one: one.metrics["binary_kl"])


def binary_kl(labels: Array, predicted: Array) -> Array:
    """P log(P / Q) + (1 - P) log((1 - P) / (1 - Q)), 0 log 0 = 0 (SpecDec++ Appendix C.3). [N]."""
    tiny = np.finfo(np.float64).tiny

    def part(p: Array, q: Array) -> Array:
        return p * (np.log(np.maximum(p, tiny)) - np.log(np.maximum(q, tiny)))

    return part(labels, predicted) + part(1.0 - labels, 1.0 - predicted)


def reliability(labels: Array, predicted: Array) -> Reliability:
    """Mean prediction and mean label of each bin of equal width that holds positions. Shapes: [N],
    [N]."""
    place = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
    count = np.bincount(place, minlength=BINS)
    held = count > 0
    means = [
        np.bincount(place, weights=x, minlength=BINS)[held] / count[held]
        for x in (predicted, labels)
    ]
    return Reliability(means[0].tolist(), means[1].tolist(), count[held].tolist())


def calibration_error(labels: Array, predicted: Array) -> float:
    """ECE: mean over positions of |mean label - mean prediction| in the position's bin."""
    bins = reliability(labels, predicted)
    gaps = np.abs(np.array(bins.observed) - np.array(bins.predicted))
    return float(np.average(gaps, weights=bins.positions))


def area_under_curve(labels: Array, predicted: Array) -> float:
    """AUC with soft labels: each position counts as accepted P times and as rejected 1 - P times.

    The probability that an accepted one is ranked above a rejected one, ties half; NaN where one
    kind is missing. Shapes: [N] each.
    """
    values, place = np.unique(predicted, return_inverse=True)
    accepted = np.bincount(place, weights=labels, minlength=len(values))
    rejected = np.bincount(place, weights=1.0 - labels, minlength=len(values))
    pairs = accepted.sum() * rejected.sum()
    if pairs <= 0.0:
        return np.nan
    return float((accepted * (np.cumsum(rejected) - 0.5 * rejected)).sum() / pairs)


def stop_threshold(t_draft: float, t_target: float, kind: DrafterKind) -> float | None:
    """SpecDec++ Theorem 3.1: stop where a rejection is at least as likely as
    (c2 + delta) / (c1 + c2 + delta), with c1 = t_draft and c2 = t_target - t_draft.

    The condition is sufficient and delta depends on the policy itself: it is taken as 0. None where
    a pass drafts a block, or where the drafter is no faster than the target.
    """
    if kind.drafts != "tokens" or not 0.0 < t_draft < t_target:
        return None
    return (t_target - t_draft) / t_target


@dataclass(frozen=True)
class OracleCounts:
    """What the oracle of SpecDec++ Lemma 2.1 would do along greedy outputs; it discards nothing."""

    tokens: int
    drafted: int
    target_calls: int


def round_starts(runs: Array) -> list[int]:
    """Prefixes at which rounds of greedy decoding begin, given the draft tokens accepted at each.

    A round emits one token more than it accepts. Shapes: runs [L].
    """
    starts, place = [], 0
    while place < len(runs):
        starts.append(place)
        place += int(runs[place]) + 1
    return starts


def oracle_counts(agrees: Sequence[Array]) -> OracleCounts:
    """Greedy decoding by a policy that stops just before each disagreement (SpecDec++ Lemma 2.1).

    agrees: [L, K] of each output; entry (p, d) says whether a draft after the first p tokens that
    holds the output's own tokens up to place d holds its token there too. A round drafts up to the
    next disagreement, at most K tokens, and the target adds one.
    """
    drafted = calls = 0
    for output in agrees:
        runs = np.cumprod(output, axis=1).sum(axis=1).astype(int)
        runs = np.minimum(runs, np.arange(len(output))[::-1])  # the target adds the last token
        starts = round_starts(runs)
        drafted, calls = drafted + int(runs[starts].sum()), calls + len(starts)
    return OracleCounts(sum(map(len, agrees)), drafted, calls)


def follow_oracle(
    pair: Pair,
    sampling: SamplingConfig,
    prompts: Sequence[Prompt],
    longest: int,
) -> OracleCounts | None:
    """The oracle along the target's plain greedy outputs, by what the drafter drafts along them.

    longest: most draft tokens of a round. None where tokens are sampled, or the drafter cannot be
    asked so.
    """
    kind, model, drafter = KINDS.get(pair.drafter.name), pair.model, pair.drafter
    if kind is None or kind.teacher_forced_probs is None or sampling.temperature > 0.0:
        return None
    along, agrees = resolve_name(kind.teacher_forced_probs), []
    outputs = decode_by(model, plain_method(sampling), sampling, prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        source, tokens = model.read(prompt.source), torch.tensor(output.tokens)
        [known] = read_outputs(model, [source], [tokens], drafter.requires)
        probs = run_single(along(drafter, known, [longest] * len(tokens), Sampling()))
        agrees.append((probs > 0.5).numpy())
    return oracle_counts(agrees)
