"""Is lossless greedy decoding the target's own output? Token for token, ties told from errors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.logits_processing import TargetProcessors
from drafttrain.decoding.types import Output, Proposal, Sampling, Source
from drafttrain.evaluation.metrics import first_difference
from drafttrain.evaluation.prompts import Prompt
from drafttrain.evaluation.report import Difference, Parity


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
    differences = []
    for prompt, output, expected in zip(prompts, outputs, others, strict=True):
        position = first_difference(output.tokens, expected.tokens)
        if position is not None:
            before = output.tokens[:position]
            gap = top_two_gap(model, prompt.source, before, max_new_tokens)
            differences.append(Difference(row=prompt.row, position=position, gap=gap))
    return Parity(
        against=against,
        compared=len(outputs),
        identical=len(outputs) - len(differences),
        differences=differences,
    )


def top_two_gap(
    model: CachedModel, source: Source, tokens: Sequence[int], max_new_tokens: int
) -> float:
    """Gap between plain decoding's two highest logits at the token after `tokens`.

    Plain decoding is run again along `tokens`, one token a call, so that the logits are those
    that it saw. Small gaps are floating-point ties: other row shapes sum in another order.
    """
    limit = model.max_new_tokens(source, max_new_tokens)
    processors = TargetProcessors(model.model, Sampling()).start(source, limit)
    nothing = torch.empty(0, dtype=torch.long, device=source.prefix.device)
    committed = source.prefix
    state = model.encode(source)
    for token in [*tokens, None]:
        score = model.score([state], [committed], [Proposal.empty()])[0]
        if token is not None:
            model.keep(state, nothing)
            committed = torch.cat([committed, committed.new_tensor([token])])
    logits = processors(committed, nothing, score.logits)[0]
    first, second = logits.topk(2).values.tolist()
    return first - second
