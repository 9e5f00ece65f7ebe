"""Analyses of SpecDec++: calibration of acceptance heads, the oracle, and Theorem 3.1.

Labels are soft: the probability that a draft token is accepted, not whether it was accepted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import torch
from scipy.special import rel_entr

from drafttrain.build.pairs import Pair
from drafttrain.config.decode import SamplingConfig
from drafttrain.config.kinds import KINDS
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
"""Maximal number of held-out outputs used to evaluate heads."""


@dataclass(frozen=True)
class Reliability:
    """Reliability diagram: mean prediction, mean label and number of positions of each bin."""

    predicted: list[float]
    observed: list[float]
    positions: list[int]


@dataclass(frozen=True)
class HeadFacts:
    """Calibration of a head on held-out draft tokens."""

    name: str
    depth: int
    metrics: dict[str, float]
    """binary_kl, ece, auc, label_mean, predicted_mean."""
    reliability: Reliability


def judge_heads(heads: Mapping[str, AcceptanceHead], folder: Path) -> list[HeadFacts]:
    """Evaluates the calibration of every head on cached held-out rows; best binary KL first.

    folder: a cache of hidden states of held-out outputs, of which the first mix is read. Raises
    ConfigError as `open_cache` does.
    """
    cache = open_cache(folder)
    hidden, acceptance = cache.read(0, range(min(ROWS, len(cache.rows))))
    labels, facts = acceptance.double().numpy(), []
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
        facts.append(HeadFacts(name, head.config.depth, known, reliability(labels, predicted)))
    return sorted(facts, key=lambda one: one.metrics["binary_kl"])


def binary_kl(labels: Array, predicted: Array) -> Array:
    """Returns P log(P / Q) + (1 - P) log((1 - P) / (1 - Q)) with P the labels, Q the predictions
    and 0 log 0 = 0 (SpecDec++ Appendix C.3). Shapes: [N], [N] -> [N]."""
    tiny = np.finfo(np.float64).tiny  # a certain wrong prediction costs much, not infinitely much
    accepted, rejected = (np.maximum(one, tiny) for one in (predicted, 1.0 - predicted))
    return rel_entr(labels, accepted) + rel_entr(1.0 - labels, rejected)


def reliability(labels: Array, predicted: Array) -> Reliability:
    """Sorts positions into `BINS` bins of equal width by prediction; empty bins are left out.
    Shapes: labels [N], predicted [N]."""
    index = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
    _, index, count = np.unique(index, return_inverse=True, return_counts=True)
    means = [np.bincount(index, weights=values) / count for values in (predicted, labels)]
    return Reliability(means[0].tolist(), means[1].tolist(), count.tolist())


def calibration_error(labels: Array, predicted: Array) -> float:
    """Returns the ECE: the mean of |mean label - mean prediction| over bins, weighted by size."""
    bins = reliability(labels, predicted)
    gaps = np.abs(np.array(bins.observed) - np.array(bins.predicted))
    return float(np.average(gaps, weights=bins.positions))


def area_under_curve(labels: Array, predicted: Array) -> float:
    """Returns the AUC with soft labels: a position with label P counts as accepted with weight P
    and as rejected with weight 1 - P.

    It is the probability that an accepted position has a higher prediction than a rejected one,
    ties counting half; NaN if all are accepted or all rejected. Shapes: [N] each.
    """
    values, index = np.unique(predicted, return_inverse=True)
    accepted = np.bincount(index, weights=labels, minlength=len(values))
    rejected = np.bincount(index, weights=1.0 - labels, minlength=len(values))
    pairs = accepted.sum() * rejected.sum()
    if pairs <= 0.0:
        return np.nan
    # per value: weight of rejected positions with lower predictions, plus half of equal ones
    return float((accepted * (np.cumsum(rejected) - 0.5 * rejected)).sum() / pairs)


def stop_threshold(t_draft: float, t_target: float) -> float | None:
    """Returns h by SpecDec++ Theorem 3.1: stop if the probability of a rejection is at least
    (c2 + delta) / (c1 + c2 + delta), with c1 = t_draft and c2 = t_target - t_draft.

    The condition is sufficient. delta depends on the policy itself and is taken as 0. Returns None
    if the drafter is not faster than the target.
    """
    return (t_target - t_draft) / t_target if 0.0 < t_draft < t_target else None


@dataclass(frozen=True)
class OracleCounts:
    """Counts of the oracle of SpecDec++ Lemma 2.1 on greedy outputs; it discards no token."""

    tokens: int
    drafted: int
    target_calls: int


def round_starts(runs: Array) -> list[int]:
    """Returns the prefix lengths at which rounds of greedy decoding begin.

    runs: [L] number of draft tokens accepted after each prefix. A round emits one more.
    """
    starts, start = [], 0
    while start < len(runs):
        starts.append(start)
        start += int(runs[start]) + 1
    return starts


def oracle_counts(agrees: Sequence[Array]) -> OracleCounts:
    """Counts greedy decoding with a policy that stops just before each disagreement (SpecDec++
    Lemma 2.1): a round drafts up to there, at most K tokens, and the target adds one.

    agrees: [L, K] per output; entry (p, d) is whether the drafter, given the output's tokens before
    position p + d, drafts its token there in a draft that begins after p tokens.
    """
    drafted = calls = 0
    for output in agrees:
        runs = np.cumprod(output, axis=1).sum(axis=1).astype(int)
        runs = np.minimum(runs, np.arange(len(output))[::-1])  # the target adds the last token
        starts = round_starts(runs)
        drafted, calls = drafted + int(runs[starts].sum()), calls + len(starts)
    return OracleCounts(sum(map(len, agrees)), drafted, calls)


def follow_oracle(
    pair: Pair, sampling: SamplingConfig, prompts: Sequence[Prompt], longest: int
) -> OracleCounts | None:
    """Counts the oracle on the target's plain greedy outputs, with the drafter teacher-forced.

    longest: maximal draft length of a round. Returns None if tokens are sampled, or if the drafter
    does not support teacher forcing.
    """
    kind, model, drafter = KINDS.get(pair.drafter.name), pair.model, pair.drafter
    if kind is None or kind.teacher_forced_probs is None or sampling.temperature > 0.0:
        return None
    teacher_forced, agrees = resolve_name(kind.teacher_forced_probs), []
    outputs = decode_by(model, plain_method(sampling), sampling, prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        source, tokens = model.read(prompt.source), torch.tensor(output.tokens)
        [known] = read_outputs(model, [source], [tokens], drafter.requires)
        probs = run_single(teacher_forced(drafter, known, [longest] * len(tokens), Sampling()))
        agrees.append((probs > 0.5).numpy())
    return oracle_counts(agrees)
