"""Acceptance heads judged on the positions of drafts that decoding really made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from drafttrain.build.method import build_sampling
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.evaluation.bootstrap import draw_resamples
from drafttrain.evaluation.prompts import Prompt
from drafttrain.evaluation.stops.calibration import (
    OnPolicy,
    calibration_metrics,
    record_positions,
    reliability,
)
from drafttrain.evaluation.stops.prices import Prices
from drafttrain.evaluation.stops.report import HeadFacts
from drafttrain.evaluation.stops.workbench import Workbench


def judge_heads(bench: Workbench, prompts: Sequence[Prompt], prices: Prices) -> list[HeadFacts]:
    """Calibration of every head on the positions of drafts that decoding really made."""
    method = bench.method(max(bench.settings.lengths), bench.state_kind)
    positions = record_positions(
        bench.target,
        bench.pair.drafter,
        method.stop,
        method.verifier,
        build_sampling(bench.sampling),
        [prompt.source for prompt in prompts],
        bench.sampling.max_new_tokens,
        partial(sequence_randomness, bench.sampling.seed + 1, device=bench.target.device),
    )
    return [head_facts(bench, name, positions, len(prompts), prices) for name in bench.heads]


def head_facts(
    bench: Workbench, name: str, positions: OnPolicy, prompts: int, prices: Prices
) -> HeadFacts:
    head = bench.heads[name]
    with torch.inference_mode():
        states = positions.hidden.to(head.device)
        predicted = head.acceptance(states).double().cpu().numpy()
    resamples = draw_resamples(prompts, bench.settings.bootstrap)
    labels, prompt, before = positions.acceptance, positions.prompt, ~positions.rejected_before
    return HeadFacts(
        name=name,
        depth=head.config.depth,
        rejection_weight=head.config.rejection_weight,
        parameters=head.num_parameters(),
        seconds=prices.heads[name],
        all_positions=calibration_metrics(labels, predicted, prompt, resamples),
        before_rejection=calibration_metrics(
            labels[before], predicted[before], prompt[before], resamples
        ),
        reliability=reliability(labels, predicted),
    )
