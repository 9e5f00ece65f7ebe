"""What drafters would draft along a known output: how likely the output's own tokens are.

Each kind that can tell has a function (`DrafterKind.probs_along`) of the drafter, a source that the
target has read, the output [L], the most tokens of a draft at each prefix [L] and the sampling. It
gives [L, K] in float64, K >= 1 being the largest of those. Entry (p, d) is the probability that a
draft behind the first p tokens of the output has the output's token p + d in place d, where it has
the output's own tokens in the places before. In greedy decoding that is 1 or 0. It is 0 behind the
end of the output, where any token is wrong, and NOT_DRAFTED where a draft has no such place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.shared import alone
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Sampling, Source

NOT_DRAFTED = -1.0


def at_every_prefix(probs: Tensor, length: int, k: int) -> Tensor:
    """The same of a drafter whose rows depend on the tokens before them alone.

    probs [M]: of the first M <= length tokens; others are not drafted.
    Shapes: -> [length, k].
    """
    known = F.pad(probs, (0, length - len(probs)), value=NOT_DRAFTED)
    return F.pad(known, (0, k - 1)).unfold(0, k, 1)


@torch.inference_mode()
def proposed_along(
    drafter: Drafter,
    source: Source,
    target_ids: Tensor,
    longest: Sequence[int],
    sampling: Sampling,
) -> Tensor:
    """The same of a drafter whose drafts have no chance in them: it is asked at every prefix."""
    session = drafter.open(source, sampling, SampledRandomness(torch.Generator()))
    tokens = torch.cat([source.prefix.cpu(), target_ids])
    stop, before = FixedLength(max(longest)), len(source.prefix)
    found = torch.full((len(target_ids), max(longest)), NOT_DRAFTED, dtype=torch.double)
    for place, most in enumerate(longest):
        if most == 0:
            continue
        proposal = alone(session.propose(tokens[: before + place], None, stop.capped(most)))
        drafted, actual = proposal.tokens, target_ids[place : place + len(proposal.tokens)]
        found[place, : len(drafted)] = 0.0
        found[place, : len(actual)] = (drafted[: len(actual)] == actual).double()
    return found
