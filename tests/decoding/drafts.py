"""Drafters with scripted drafts, so that tests know which tokens are right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from drafttrain.decoding.roles import StopPolicy
from drafttrain.decoding.target_states import TargetRequirements
from drafttrain.decoding.types import Proposal, Sampling, Source
from tests.tiny_models import EOS, VOCAB


class ScriptedDrafter:
    """Proposes the scripted block of the source and prefix length; -1 stands for no token."""

    provides = frozenset()
    requires = TargetRequirements()
    drafts_trees = False

    def __init__(self, blocks: Mapping[tuple[int, ...], Tensor], name: str = "scripted") -> None:
        self.blocks = blocks
        self.name = name

    def draw_kind(self, sampling: Sampling) -> str:
        return "deterministic"

    def open(self, source: Source, sampling: Sampling, randomness: object) -> SimpleNamespace:
        blocks = self.blocks[tuple(source.input_ids.tolist())]

        def propose(tokens: Tensor, target_state: object, stop: StopPolicy) -> Proposal:
            block = blocks[len(tokens) - len(source.prefix)]
            return Proposal.chain(block[block >= 0][: stop.longest])

        return SimpleNamespace(propose=propose)


def noisy_blocks(tokens: Sequence[int], k: int, wrong: float, seed: int = 0) -> Tensor:
    """Returns blocks [L, k] for every prefix of an output, replacing tokens at random with
    probability `wrong`."""
    generator = torch.Generator().manual_seed(seed)
    padded = torch.tensor([*tokens, *[7] * k])
    blocks = torch.stack([padded[p : p + k] for p in range(len(tokens))])
    noise = torch.randint(2, VOCAB, blocks.shape, generator=generator)
    return torch.where(torch.rand(blocks.shape, generator=generator) < wrong, noise, blocks)


def half_right(
    sources: Sequence[Source], outputs: Sequence[Sequence[int]], k: int = 4, wrong: float = 0.5
) -> ScriptedDrafter:
    """Returns a drafter of the known outputs of these sources with tokens replaced at random."""
    return ScriptedDrafter(
        {
            tuple(source.input_ids.tolist()): noisy_blocks(output, k, wrong)
            for source, output in zip(sources, outputs, strict=True)
        }
    )


def rounds_along(
    blocks: Tensor, output: Sequence[int], longest: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the drafted and emitted tokens of each round of greedy verification whose draft at
    prefix p is blocks[p].

    A round accepts the longest common prefix of blocks[p] and output[p:] and emits one more token,
    for which drafts leave room below `longest`. Drafts end before a token -1 and after EOS. Shapes:
    blocks [P, k], P >= L, the length of the output with its EOS.
    """
    start = 0
    while start < len(output):
        draft = blocks[start].tolist()[: longest - start - 1]
        draft = draft[: draft.index(-1)] if -1 in draft else draft
        draft = draft[: draft.index(EOS) + 1] if EOS in draft else draft
        left = list(output[start:])
        accepted = next((i for i, token in enumerate(draft) if [token] != left[i : i + 1]), None)
        emitted = left[: (len(draft) if accepted is None else accepted) + 1]
        yield draft, emitted
        start += len(emitted)
