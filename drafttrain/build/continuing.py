"""What a drafter in training decodes with, where it continues rows itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.build.verifiers import AUTO, build_verifier
from drafttrain.config.base import ConfigError
from drafttrain.config.language_recipes import CausalDrafterRecipe
from drafttrain.data.batches.drafted import BegunRow, DraftedRound
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.engine.architectures import FAMILIES, is_known
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.finite import on_finite_scores
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Sampling

EPOCH = 2**32
"""Random streams of an epoch: more than rows."""


@dataclass(frozen=True)
class Continuation:
    """`ContinueRows`: speculative sampling by a fixed draft length, or greedy at temperature 0.

    Each row draws from a stream that follows from (seed, epoch, row) alone.
    """

    target: CachedModel
    draftable: Tensor | None
    sampling: Sampling
    draft: int
    new_tokens: int
    seed: int

    def __call__(
        self, model: PreTrainedModel, begun: Sequence[BegunRow]
    ) -> list[list[DraftedRound]]:
        drafter = CausalDrafter(CachedModel(model, draftable=self.draftable))
        device = self.target.device

        def randomness(place: int):
            row = begun[place]
            return sequence_randomness(self.seed, EPOCH * row.epoch + row.row, device)

        decoder = Decoder(
            self.target,
            drafter,
            FixedLength(self.draft),
            on_finite_scores(build_verifier(AUTO, self.sampling)),
            self.sampling,
            randomness,
        )
        sources = [make_source(row.tokens, self.target.model) for row in begun]
        outputs = decoder.decode_all(sources, self.new_tokens, len(sources))
        return [
            [
                DraftedRound(list(one.drafted), len(one.path), list(one.emitted))
                for one in output.rounds
            ]
            for output in outputs
        ]


def check_drafted_prefixes(config: PretrainedConfig, share: float) -> None:
    """Refuse families that cannot read many drafts behind one text. Raises ConfigError."""
    if not is_known(config):
        raise ConfigError(
            f"on_policy.share = {share}: how a {config.model_type!r} model takes positions is not "
            f"known, so it cannot read several drafts at once; use a family that is known "
            f"({FAMILIES}), or leave on_policy out"
        )


def build_continuation(
    settings: CausalDrafterRecipe, target: PreTrainedModel, draftable: Tensor | None
) -> Continuation:
    """What continues a share of the rows, as the settings say."""
    own = settings.on_policy
    return Continuation(
        CachedModel(target),
        draftable,
        Sampling(own.temperature),
        own.draft or settings.drafter.k,
        own.new_tokens,
        settings.train.seed,
    )
