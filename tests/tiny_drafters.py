"""Tiny drafters: Spec-Drafters of tiny targets, block heads, and noisy copies of a target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from drafttrain.config.recipes import DrafterConfig
from drafttrain.models.block_heads import BlockHeads, BlockHeadsConfig
from drafttrain.models.causal_drafter import shallow_config
from drafttrain.models.language_models import layer_stem, take_layers
from drafttrain.models.spec_drafter.initialise import initialise
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.models.spec_drafter.shape import has_own_output, make_config
from tests.tiny_models import VOCAB, near_copy, tiny_model


def shared(family: str) -> PreTrainedModel:
    """A tiny target whose encoder and decoder share their embeddings, with a head of its own."""
    return tiny_model(family, tie_word_embeddings=True)


def tiny_drafter(family: str = "marian", parts: str = "both", **settings) -> SpecDrafter:
    target = shared(family)
    settings = DrafterConfig(**{"k": 4, "previous_token_rank": 0} | settings)
    config = make_config(target.config, settings, None, untied_output=has_own_output(target))
    torch.manual_seed(0)
    drafter = SpecDrafter(config).double().eval()
    initialise(drafter, target, parts)
    return drafter


def block_heads(k: int = 4, std: float | None = 0.5, **settings) -> BlockHeads:
    """Heads on a tiny model of width 16, random ones unless std is None."""
    shape = {"hidden_size": 16, "ffn_size": 6, "vocab_size": VOCAB}
    torch.manual_seed(2)
    heads = BlockHeads(BlockHeadsConfig(k=k, **shape | settings)).double().eval()
    for parameter in heads.parameters() if std is not None else ():
        parameter.data.normal_(std=std)
    return heads


def noisy(model: PreTrainedModel, family: str, scale: float = 0.15) -> PreTrainedModel:
    """A drafter that is right about some tokens: the target's weights with noise."""
    drafter = tiny_model(family)
    drafter.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    for parameter in drafter.parameters():
        parameter.data += scale * parameter.data.std().nan_to_num(0.0) * torch.randn_like(parameter)
    return drafter


def behind_prompts(
    target: PreTrainedModel, layers: Sequence[int], k: int | None = None, noise: float = 0.15
) -> PreTrainedModel:
    """Layers of a decoder-only target with noise, which read prompts in its keys and values.

    k: it drafts blocks of so many tokens through masks, token 3.
    """
    drafter = type(target)(shallow_config(target.config, layers)).double().eval()
    drafter.load_state_dict(take_layers(target.state_dict(), layer_stem(target), layers))
    drafter.config.prompt_layers = list(layers)
    if k is not None:
        drafter.config.pard_token, drafter.config.k = 3, k
    return near_copy(drafter, noise, seed=1)
