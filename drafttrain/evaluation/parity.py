"""Do two runs give the same tokens? Differences that rounding explains are told from errors.

A greedy choice may differ where the target's two best logits tie. A draw may differ where its
variate lies at the boundary between the two choices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafttrain.build.method import Method
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.logits_processing import TargetProcessors
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.types import Output, Proposal, Sampling, Source
from drafttrain.decoding.watched import Choice, WatchedRandomness
from drafttrain.evaluation.metrics import first_difference
from drafttrain.evaluation.options import EvaluationOptions
from drafttrain.evaluation.prompts import Prompt
from drafttrain.evaluation.report import GAP_TOLERANCE, Difference, Parity
from drafttrain.evaluation.runner import decode_by, make_waves

DRAW_ROUNDINGS = 128
"""Roundings of float32 within which a draw is at a boundary.

In 1,265 draws of a pair whose target has 12 layers, boundaries in batches of 3 and 8 were up to 82
roundings from those of each sequence alone, 1 to 4 at the median.
"""
COARSE_ROUNDINGS = 8
"""The same of narrower types, to which finished sums are rounded."""
LOGIT_ROUNDINGS = 2
"""Roundings of the target's type, at the size of its logits, within which its two best are a tie.

In bfloat16 the best logits of SmolLM2-135M are 25 in the median, 12 to 39 in nine of ten rows, and
first differences of 160 inputs, by four methods each, had gaps of 0.25 at most.
"""


def draw_bound(dtype: torch.dtype) -> float:
    """How near a boundary a draw has to lie where rounding is to explain it, for a target's type.

    1.5e-5 for float32 (and float64), 6.3e-2 for bfloat16.
    """
    float32 = torch.finfo(torch.float32).eps
    return max(DRAW_ROUNDINGS * float32, COARSE_ROUNDINGS * torch.finfo(dtype).eps)


def tie_bound(dtype: torch.dtype, logits: Sequence[float]) -> float:
    """How near the target's two best logits have to be where rounding is to explain a difference.

    1e-4 of float32 (and float64), as its sums are exact to some roundings of what is added up;
    narrower types round each logit by itself: of bfloat16 0.31 at logits of 20. logits: the best
    ones where outputs part.
    """
    largest = max(map(abs, logits), default=0.0)
    return max(GAP_TOLERANCE, LOGIT_ROUNDINGS * torch.finfo(dtype).eps * largest)


def compare_outputs(
    model: CachedModel,
    prompts: Sequence[Prompt],
    outputs: Sequence[Output],
    others: Sequence[Output],
    max_new_tokens: int,
    against: str,
) -> Parity:
    """Every first difference of two runs, with plain decoding's top-2 logit gap there.

    against: the name of the other run.
    """
    differences, best = [], []
    for prompt, output, expected in zip(prompts, outputs, others, strict=True):
        position = first_difference(output.tokens, expected.tokens)
        if position is not None:
            before = output.tokens[:position]
            first, second = top_two(model, prompt.source, before, max_new_tokens)
            best.append(first)
            gap = first - second
            differences.append(Difference(row=prompt.row, position=position, gap=gap))
    return Parity(
        against=against,
        compared=len(outputs),
        identical=len(outputs) - len(differences),
        differences=differences,
        bound=tie_bound(model.model.dtype, best),
    )


def compare_draws(
    model: CachedModel,
    method: Method,
    prompts: Sequence[Prompt],
    outputs: Sequence[Output],
    alone: Sequence[Output],
    options: EvaluationOptions,
    batch_size: int,
) -> Parity:
    """Every first difference of sampled outputs from those of batch size 1, with its draw's gap.

    Nothing was noted while they were decoded: waves in which some differ are decoded once more, and
    then their sequences alone, draw by draw beside them.
    """
    places = {
        place: position
        for place, (output, other) in enumerate(zip(outputs, alone, strict=True))
        if (position := first_difference(output.tokens, other.tokens)) is not None
    }
    differences = []
    for wave in make_waves(len(prompts), batch_size, options.wave_batches):
        differing = [place for place in wave if place in places]
        if not differing:
            continue
        watched = _watch(model, method, [prompts[place] for place in wave], options, batch_size)
        for place in differing:
            others = watched[prompts[place].row].choices
            seen = _watch(model, method, [prompts[place]], options, 1, others)
            gap = seen[prompts[place].row].distance
            differences.append(Difference(row=prompts[place].row, position=places[place], gap=gap))
    return Parity(
        against="batch size 1",
        compared=len(outputs),
        identical=len(outputs) - len(differences),
        differences=differences,
        sampled=True,
        bound=draw_bound(model.model.dtype),
    )


def _watch(
    model: CachedModel,
    method: Method,
    prompts: Sequence[Prompt],
    options: EvaluationOptions,
    batch_size: int,
    others: Sequence[Choice] = (),
) -> dict[int, WatchedRandomness]:
    """What was drawn for every prompt, by its row."""
    found = {}

    def open_randomness(seed: int, row: int, device: torch.device) -> WatchedRandomness:
        found[row] = WatchedRandomness(sequence_randomness(seed, row, device).generator, others)
        return found[row]

    decode_by(model, method, prompts, options, batch_size, open_randomness)
    return found


def top_two_gap(
    model: CachedModel, source: Source, tokens: Sequence[int], max_new_tokens: int
) -> float:
    """Gap between plain decoding's two highest logits at the token after `tokens`."""
    first, second = top_two(model, source, tokens, max_new_tokens)
    return first - second


def top_two(
    model: CachedModel, source: Source, tokens: Sequence[int], max_new_tokens: int
) -> tuple[float, float]:
    """Plain decoding's two highest logits at the token after `tokens`.

    Plain decoding is run again along `tokens`, one token a call, so that the logits are those
    that it saw. Small gaps are floating-point ties: other row shapes sum in another order.
    """
    state = model.encode(source)
    limit = model.max_new_tokens(state.source, max_new_tokens)
    processors = TargetProcessors(model.model, Sampling()).start(state.source, limit)
    committed = state.source.prefix
    nothing = torch.empty(0, dtype=torch.long, device=committed.device)
    for token in [*tokens, None]:
        score = model.score([state], [committed], [Proposal.empty()])[0]
        if token is not None:
            model.keep(state, nothing)
            committed = torch.cat([committed, committed.new_tensor([token])])
    logits = processors(committed, nothing, score.logits)[0]
    first, second = logits.topk(2).values.tolist()
    return first, second
