"""How far the target agrees with what was decoded, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.types import Output, Proposal, Sampling, Source
from drafttrain.evaluation.bootstrap import Array, Estimate, Ratio, estimate_ratio
from drafttrain.evaluation.options import EvaluationOptions
from drafttrain.evaluation.prompts import Prompt

Judged = dict[tuple[int, tuple[int, ...]], Tensor]
"""What `along` found, by a prompt's place and an output: lossless methods have the same ones."""
CHUNK = 64
"""Tokens whose rows are there at once."""


def target_agreement(
    model: CachedModel,
    prompts: Sequence[Prompt],
    outputs: Sequence[Output],
    options: EvaluationOptions,
    resamples: Array,
    known: Judged,
) -> Estimate | None:
    """The target's probability of an emitted token after those before it, the mean of all tokens.

    By the target's rows as it decodes. In greedy decoding, where they are point masses, it is the
    share of tokens that are the target's own choice. A lossless method has 1 there, and what plain
    decoding has where tokens are sampled, up to randomness. known: no output is judged twice.
    """
    judged = []
    for place, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        key = place, tuple(output.tokens)
        if key not in known:
            known[key] = along(
                model, prompt.source, output.tokens, options.sampling, options.max_new_tokens
            )
        judged.append(known[key])
    sums = np.array([float(probs.sum()) for probs in judged])
    counts = np.array([float(len(probs)) for probs in judged])
    return estimate_ratio(Ratio(sums, counts), resamples)


@torch.inference_mode()
def along(
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
