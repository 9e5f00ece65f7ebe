"""What acceptance heads learn from: drafted tokens, how likely each is accepted, token mixing.

Along a target's output X the drafter's row at each position draws a token Y_i; its label is the
probability P_i = min(1, target(Y_i) / draft(Y_i)) that rejection sampling accepts it. The drafter
then reads Z, which keeps X_i with probability r and has Y_i elsewhere; the positions of Y_i are in
the loss (SpecDec++, Section 3.2). Labels are those of the prefix X, not recomputed for Z.

Every row draws from its own random numbers, so that neither batches nor processes change anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Mixed:
    """One mix of one output."""

    tokens: Tensor
    """[L] Z: the drafted token, or the output's own."""
    drafted: Tensor
    """[L] true where the token was drafted: these positions are in the loss."""
    acceptance: Tensor
    """[L] P, the label of each drafted token; float32 at least."""


def row_uniforms(seed: int, mix: int, row: int, count: int, each: int = 2) -> np.ndarray:
    """Random numbers of one row in one mix, [count, each] in [0, 1).

    Number i depends on seed, mix, row and i alone: a longer row begins like a shorter one.
    """
    return np.random.default_rng((seed, mix, row)).random((count, each))


def draw_tokens(probs: Tensor, uniforms: Tensor) -> Tensor:
    """A token of each row by inversion of its distribution function, in float64.

    Tokens of probability zero are never drawn. Shapes: probs [L, V], uniforms [L, R] -> [L, R].
    """
    mass = probs.double().cumsum(dim=-1)
    total = mass[:, -1:].contiguous()
    asked = (uniforms.to(mass) * total).contiguous()
    tokens = torch.searchsorted(mass, asked, right=True)
    last = torch.searchsorted(mass, total)  # first token that reaches the whole mass
    return tokens.minimum(last)


def acceptance_of(tokens: Tensor, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """min(1, target / draft) at each token (Leviathan et al. 2023, Algorithm 1).

    Shapes: tokens [L, R], target_probs and draft_probs [L, V] -> [L, R].
    """
    return (target_probs.gather(1, tokens) / draft_probs.gather(1, tokens)).clamp(max=1.0)


def mix_tokens(
    output: Tensor, target_probs: Tensor, draft_probs: Tensor, keep: float, uniforms: Tensor
) -> list[Mixed]:
    """R mixes of one output X. `keep` is r, the share of X that stays.

    Shapes: output [L], target_probs and draft_probs [L, V] (warped, row i - 1 for token i),
    uniforms [R, L, 2] -> R mixes.
    """
    drawn = draw_tokens(draft_probs, uniforms[:, :, 0].T)
    acceptance = acceptance_of(drawn, target_probs, draft_probs)
    mixes = []
    for mix in range(len(uniforms)):
        drafted = uniforms[mix, :, 1].to(output.device) >= keep
        tokens = torch.where(drafted, drawn[:, mix], output)
        mixes.append(Mixed(tokens, drafted, acceptance[:, mix]))
    return mixes
