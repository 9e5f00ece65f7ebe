"""Spec-Drafter: a deep encoder and a shallow mask-predict decoder (SpecDec Section 3.1).

The decoder reads the accepted prefix followed by masks and predicts all k tokens of a block in one
forward pass. It is a model of the target's family and uses the family's own classes (`build.py`),
so Transformers computes, saves and loads it. Two optional parts are additions of drafttrain:

- previous-token features: correct each slot by the token drafted before it;
- a part of the vocabulary: only `draftable_tokens` are scored.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from drafttrain.models.draftable import UNDRAFTED, draftable_indices, draftable_tokens
from drafttrain.models.previous_token import PreviousToken
from drafttrain.models.spec_drafter.shape import shape_of

Base = PreTrainedModel if TYPE_CHECKING else object


class SpecDrafter(Base):
    """Mixin that turns a family's model class into a Spec-Drafter: see `class_of`."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.shape = shape_of(config)
        self.width: int = config.get_text_config(decoder=True).hidden_size
        rank = self.shape.previous_token_rank
        self.previous_token = PreviousToken(self.width, rank) if rank else None

    @classmethod
    def from_pretrained(cls, path: Any, **settings: Any) -> SpecDrafter:
        """Loads a Spec-Drafter of any family from a folder."""
        if cls is not SpecDrafter:
            return super().from_pretrained(path, **settings)
        config = AutoConfig.from_pretrained(path, revision=settings.get("revision"))
        return class_of(config).from_pretrained(path, **settings)

    @cached_property
    def draftable(self) -> Tensor | None:
        """[N] draftable tokens in rising order; None: all. Raises ConfigError."""
        return draftable_tokens(self.config, self.shape.vocab_size)

    @property
    def embed_tokens(self) -> nn.Module:
        """The decoder's token embeddings."""
        return self.get_decoder().embed_tokens

    def draftable_logits(self, hidden: Tensor, previous: Tensor | None = None) -> Tensor:
        """Computes the logits of the draftable tokens, given the token before each prediction.

        Previous-token features first correct the hidden states (`PreviousToken`), unless previous
        is None. Shapes: hidden [..., D], previous [...] -> [..., N].
        """
        if self.previous_token is not None and previous is not None:
            hidden = self.previous_token(hidden, self.embed_tokens(previous))
        output, scale = self.get_output_embeddings(), self.shape.logit_scale
        chosen: Any = slice(self.shape.vocab_size)
        if self.draftable is not None:
            chosen = self.draftable.to(output.weight.device)
        biases = (getattr(output, "bias", None), getattr(self, "final_logits_bias", None))
        given = [bias.reshape(-1)[chosen] for bias in biases if bias is not None]
        hidden = hidden if scale == 1.0 else hidden * scale
        bias = sum(given[1:], given[0]) if given else None
        return F.linear(hidden, output.weight[chosen], bias)

    def logits(self, hidden: Tensor, previous: Tensor | None = None) -> Tensor:
        """Computes the logits of all tokens; those that cannot be drafted have `UNDRAFTED`.
        Shapes: [..., D], [...] -> [..., V]."""
        logits = self.draftable_logits(hidden, previous)
        if self.draftable is None:
            return logits
        every = logits.new_full((*logits.shape[:-1], self.shape.vocab_size), UNDRAFTED)
        return every.index_copy(-1, self.draftable.to(logits.device), logits)

    def draftable_labels(self, labels: Tensor, ignored: int) -> Tensor:
        """Returns the index of each label [...] among draftable tokens, `ignored` for others."""
        return draftable_indices(labels, self.draftable, ignored)

    def previous_token_rows(self) -> Tensor:
        """Returns the change of each token's score per unit of previous-token feature [V, rank]."""
        weight = self.get_output_embeddings().weight[: self.shape.vocab_size]
        return weight @ self.previous_token.out.weight * self.shape.logit_scale


def family_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Returns the model class of an encoder-decoder configuration; None if there is none."""
    speech = MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING.get(type(config), None)
    return MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING.get(type(config), speech)


def class_of(config: PretrainedConfig) -> type[SpecDrafter]:
    """Returns `SpecDrafter` mixed into the family's class, with the name of the latter, which
    config.json records: so it can load such a folder too, without the parts of drafttrain."""
    return _class_of(family_class(config))


@cache
def _class_of(family: type[PreTrainedModel]) -> type[SpecDrafter]:
    return type(family.__name__, (SpecDrafter, family), {"__module__": __name__})
