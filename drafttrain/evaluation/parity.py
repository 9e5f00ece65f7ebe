"""Compares two greedy runs token by token, and tells rounding from errors.

Greedy choices may differ where the target's two highest logits tie up to rounding. Of sampled runs
only the number of identical outputs is reported.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.logits_processing import TargetProcessors
from drafttrain.decoding.types import Output, Proposal, Sampling, Source
from drafttrain.evaluation.metrics import first_difference
from drafttrain.evaluation.prompts import Prompt
from drafttrain.evaluation.report import GAP_TOLERANCE, Difference, Parity

LOGIT_ROUNDINGS = 2
"""Roundings of the target's type, at the size of its logits, within which its two best are a tie.

In bfloat16 the best logits of SmolLM2-135M are 25 in the median, 12 to 39 in nine of ten rows, and
first differences of 160 inputs, by four methods each, had gaps of 0.25 at most.
"""


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
