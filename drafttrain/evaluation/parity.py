"""How outputs compare with the target's own: token by token, and by the target's probabilities.

Greedy choices may differ where the target's two highest logits tie up to rounding, which is told
from errors. Of sampled runs only the number of identical outputs is reported.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.logits_processing import TargetProcessors
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.types import Output, Proposal, Sampling, Source
from drafttrain.evaluation.bootstrap import Array, Estimate, Ratio, estimate_ratio
from drafttrain.evaluation.metrics import first_difference
from drafttrain.evaluation.options import EvaluationOptions
from drafttrain.evaluation.prompts import Prompt
from drafttrain.evaluation.report import GAP_TOLERANCE, Difference, Parity

Judged = dict[tuple[int, tuple[int, ...]], Tensor]
"""Results of `token_probs` by prompt and output: lossless methods have the same ones."""
CHUNK = 64
"""Tokens scored in one call."""
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


def target_agreement(
    model: CachedModel,
    prompts: Sequence[Prompt],
    outputs: Sequence[Output],
    options: EvaluationOptions,
    resamples: Array,
    known: Judged,
) -> Estimate | None:
    """The target's probability of an emitted token after those before it, the mean of all tokens.

    In greedy decoding it is the share of tokens that are the target's own choice, 1 for lossless
    methods. Sampled lossless methods have what plain decoding has, up to randomness. known: no
    output is judged twice.
    """
    judged = []
    for place, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        key = place, tuple(output.tokens)
        if key not in known:
            known[key] = token_probs(
                model, prompt.source, output.tokens, options.sampling, options.max_new_tokens
            )
        judged.append(known[key])
    sums = np.array([float(probs.sum()) for probs in judged])
    counts = np.array([float(len(probs)) for probs in judged])
    return estimate_ratio(Ratio(sums, counts), resamples)


@torch.inference_mode()
def token_probs(
    model: CachedModel,
    source: Source,
    tokens: Sequence[int],
    sampling: Sampling,
    max_new_tokens: int,
) -> Tensor:
    """The target's probability of each token of an output, given those before it. Shape: [L]."""
    state = model.encode(source)
    process = model.processors(sampling).start(
        state.source, model.max_new_tokens(state.source, max_new_tokens)
    )
    committed, found = state.source.prefix.cpu(), [torch.empty(0, dtype=torch.float64)]
    for chunk in torch.tensor(tokens, dtype=torch.long).split(CHUNK):
        fed = Proposal.chain(chunk[:-1])
        [output] = model.score([state], [committed], [fed])
        probs = warp(process(committed, fed.tokens, output.logits, fed.parents), sampling).cpu()
        found.append(probs.gather(1, chunk[:, None])[:, 0].double())
        model.keep(state, torch.arange(len(chunk) - 1))
        committed = torch.cat((committed, chunk))
    return torch.cat(found)
