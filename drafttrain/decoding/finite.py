"""Scores that are not finite: an error where they decide, not tokens that mean nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from drafttrain.decoding.roles import Randomness, Verifier
from drafttrain.decoding.shared import Steps, steps
from drafttrain.decoding.types import NotFinite, Proposal, Sampling, Verdict


def on_finite_scores(verifier: Verifier) -> Verifier:
    """The same rule, which raises NotFinite where a row that it went by has no finite maximum.

    Rows off the accepted path may hold anything, since the output does not depend on them.
    """
    return replace(verifier, function=partial(_verify, verifier.function))


def _verify(
    function: Any,
    proposal: Proposal,
    target_logits: Tensor,
    sampling: Sampling,
    randomness: Randomness,
    **settings: float,
) -> Steps[Verdict]:
    verdict = yield from steps(function(proposal, target_logits, sampling, randomness, **settings))
    rows = [0, *(node + 1 for node in verdict.path.tolist())]
    if not target_logits[rows].amax(dim=-1).isfinite().all():
        raise NotFinite("the target's scores are not finite; load it in float32 or bfloat16")
    return verdict
