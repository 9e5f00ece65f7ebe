"""How well an acceptance head knows: binary KL, calibration error, reliability, AUC.

Labels are soft: the probability that a drafted token is accepted, not whether it was. Positions are
on-policy: drafts that decoding really made, where the head will be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from drafttrain.config.kinds import KINDS, with_states
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Drafter, Randomness, StopPolicy, Verifier
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.shared import Steps, steps
from drafttrain.decoding.types import Proposal, Sampling, Source, Verdict
from drafttrain.decoding.verifiers import acceptance_probability
from drafttrain.evaluation.bootstrap import (
    Array,
    Estimate,
    Ratio,
    estimate_ratio,
    estimate_score,
    with_interval,
)

BINS = 15
"""Bins of the calibration error and of the reliability diagram."""
AUC_RESAMPLES = 200
"""Resamples for the interval of the AUC, which is no function of a few sums."""


@dataclass(frozen=True)
class OnPolicy:
    """Positions at which a draft's states are known, from rounds that decoding really played."""

    hidden: Tensor
    """[N, D] what heads read."""
    acceptance: Array
    """[N] probability that the token was accepted given the drafted path before it."""
    rejected_before: Array
    """[N] whether an earlier token of the same draft was rejected."""
    prompt: Array
    """[N] number of the prompt, from 0."""


@dataclass
class AcceptanceRecorder:
    """A verifier's function that notes what heads could have seen, and how likely acceptance was.

    slots: whether states are those of slots, which do not know the token drawn; the label is then
    the expected acceptance sum_v min(target, draft).
    """

    verifier: Verifier
    slots: bool = False
    hidden: list[Tensor] = field(default_factory=list)
    acceptance: list[Tensor] = field(default_factory=list)
    rejected_before: list[Tensor] = field(default_factory=list)

    def __call__(
        self,
        proposal: Proposal,
        target_logits: Tensor,
        sampling: Sampling,
        randomness: Randomness,
        **settings: float,
    ) -> Steps[Verdict]:
        verdict = yield from steps(
            self.verifier.function(proposal, target_logits, sampling, randomness, **settings)
        )
        if proposal.hidden is not None and len(proposal.tokens) > 0:
            known = min(len(proposal.hidden), len(proposal.tokens))
            self.hidden.append(torch.stack(tuple(proposal.hidden[:known])).float().cpu())
            likely = _acceptance(proposal, target_logits, sampling, self.slots)
            self.acceptance.append(likely[:known])
            self.rejected_before.append(torch.arange(known) > len(verdict.path))
        return verdict


def _acceptance(
    proposal: Proposal, target_logits: Tensor, sampling: Sampling, slots: bool
) -> Tensor:
    """Acceptance of each drafted token (or slot), given the drafted path. [N], float64."""
    target_probs = warp(target_logits, sampling)[:-1]
    tokens = proposal.tokens.to(target_probs.device)
    if proposal.draft_probs is None:
        return target_probs.gather(-1, tokens[:, None])[:, 0].double().cpu()
    draft_probs = proposal.draft_probs.to(target_probs)
    if slots:
        return torch.minimum(draft_probs, target_probs).sum(-1).clamp_max(1.0).double().cpu()
    return acceptance_probability(target_probs, draft_probs, tokens).double().cpu()


def record_positions(
    target: CachedModel,
    drafter: Drafter,
    stop: StopPolicy,
    verifier: Verifier,
    sampling: Sampling,
    sources: Sequence[Source],
    max_new_tokens: int,
    randomness: Callable[[int], Randomness],
) -> OnPolicy:
    """Decode, and note every drafted position whose state a head could have read.

    Raises ValueError for a drafter that shows no states.
    """
    found = []
    kind = KINDS.get(drafter.name)
    slots = kind is not None and "slot" in kind.states
    for number, source in enumerate(sources):
        recorder = AcceptanceRecorder(verifier, slots)
        recording, own = replace(verifier, function=recorder), randomness(number)
        Decoder(target, drafter, stop, recording, sampling, lambda _, own=own: own).decode_all(
            [source], max_new_tokens
        )
        if recorder.hidden:
            found.append((number, recorder))
    if not found:
        raise ValueError(
            f"drafter {drafter.name!r} showed no states in {len(sources)} prompts, so no head can "
            f"be judged; give {with_states()} as drafter"
        )
    acceptance = [torch.cat(recorder.acceptance) for _, recorder in found]
    return OnPolicy(
        hidden=torch.cat([state for _, recorder in found for state in recorder.hidden]),
        acceptance=torch.cat(acceptance).numpy(),
        rejected_before=torch.cat(
            [flags for _, recorder in found for flags in recorder.rejected_before]
        ).numpy(),
        prompt=np.repeat([number for number, _ in found], [len(part) for part in acceptance]),
    )


def binary_kl(labels: Array, predicted: Array) -> Array:
    """P log(P / Q) + (1 - P) log((1 - P) / (1 - Q)), 0 log 0 = 0 (SpecDec++ Appendix C.3). [N]."""
    tiny = np.finfo(np.float64).tiny

    def part(p: Array, q: Array) -> Array:
        return p * (np.log(np.maximum(p, tiny)) - np.log(np.maximum(q, tiny)))

    return part(labels, predicted) + part(1.0 - labels, 1.0 - predicted)


@dataclass(frozen=True)
class Reliability:
    """Positions by predicted acceptance: what was predicted, and what came."""

    predicted: list[float]
    """Mean prediction of each bin that has positions."""
    observed: list[float]
    """Mean label."""
    positions: list[int]


def bin_places(predicted: Array, bins: int = BINS, equal_mass: bool = False) -> Array:
    """Bin of each position: of equal width, or of (nearly) equal numbers of positions. [N]."""
    if not equal_mass:
        return np.minimum((predicted * bins).astype(np.int64), bins - 1)
    place = np.empty(len(predicted), dtype=np.int64)
    place[np.argsort(predicted, kind="stable")] = np.arange(len(predicted)) * bins // len(predicted)
    return place


def reliability(
    labels: Array, predicted: Array, bins: int = BINS, equal_mass: bool = False
) -> Reliability:
    """Mean prediction and mean label of each bin. Shapes: [N], [N]."""
    place = bin_places(predicted, bins, equal_mass)
    count = np.bincount(place, minlength=bins)
    there = count > 0
    share = [np.bincount(place, weights=x, minlength=bins)[there] for x in (predicted, labels)]
    return Reliability(
        predicted=(share[0] / count[there]).tolist(),
        observed=(share[1] / count[there]).tolist(),
        positions=count[there].tolist(),
    )


def calibration_error(
    labels: Array,
    predicted: Array,
    prompt: Array,
    resamples: Array,
    bins: int = BINS,
    equal_mass: bool = False,
) -> Estimate:
    """ECE: mean over positions of |mean label - mean prediction| in the position's bin.

    The bins stay those of all positions in every resample. Shapes: [N] each, resamples [B, P].
    """
    place = bin_places(predicted, bins, equal_mass)
    statistics = np.zeros((resamples.shape[1], bins + 1))
    np.add.at(statistics, (prompt, place), labels - predicted)
    np.add.at(statistics[:, bins], prompt, 1.0)

    def error(summed: Array) -> float:
        return float(np.abs(summed[:bins]).sum() / summed[bins])

    return estimate_score(error, statistics, resamples)


def area_under_curve(labels: Array, predicted: Array) -> float | None:
    """AUC with soft labels: each position counts as accepted P times and as rejected 1 - P times.

    The probability that an accepted one is ranked above a rejected one, ties half; None where there
    is nothing of one kind. Shapes: [N], [N].
    """
    values, place = np.unique(predicted, return_inverse=True)
    return _area(labels, 1.0 - labels, place, len(values))


def _area(accepted: Array, rejected: Array, place: Array, count: int) -> float | None:
    above = np.bincount(place, weights=accepted, minlength=count)
    under = np.bincount(place, weights=rejected, minlength=count)
    pairs = above.sum() * under.sum()
    if pairs <= 0.0:
        return None
    return float((above * (np.cumsum(under) - 0.5 * under)).sum() / pairs)


def calibration_metrics(
    labels: Array, predicted: Array, prompt: Array, resamples: Array
) -> dict[str, Estimate]:
    """Every metric with its interval over prompts. Shapes: [N] each, resamples [B, P]."""
    prompts = resamples.shape[1]
    count = np.bincount(prompt, minlength=prompts).astype(np.float64)

    def mean(values: Array) -> Estimate | None:
        summed = np.bincount(prompt, weights=values, minlength=prompts)
        return estimate_ratio(Ratio(summed, count), resamples)

    metrics = {
        "binary_kl": mean(binary_kl(labels, predicted)),
        "ece": calibration_error(labels, predicted, prompt, resamples),
        "ece_equal_mass": calibration_error(labels, predicted, prompt, resamples, equal_mass=True),
        "auc": _area_estimate(labels, predicted, prompt, resamples[:AUC_RESAMPLES]),
        "label_mean": mean(labels),
        "predicted_mean": mean(predicted),
    }
    return {name: found for name, found in metrics.items() if found is not None}


def _area_estimate(
    labels: Array, predicted: Array, prompt: Array, resamples: Array
) -> Estimate | None:
    value = area_under_curve(labels, predicted)
    if value is None:
        return None
    values, place = np.unique(predicted, return_inverse=True)
    resampled = []
    for drawn in resamples:
        weights = drawn[prompt]
        area = _area(labels * weights, (1.0 - labels) * weights, place, len(values))
        resampled.append(np.nan if area is None else area)
    return with_interval(value, np.array(resampled))
