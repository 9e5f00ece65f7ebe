"""Tiny drafters: Spec-Drafters of tiny targets, block heads, parallel drafters, and noisy copies of
a target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from drafttrain.build.pairs import make_drafter
from drafttrain.config.recipes import DrafterConfig
from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.drafters.parallel import ParallelDrafter
from drafttrain.models.block_heads import BlockHeads, BlockHeadsConfig
from drafttrain.models.spec_drafter.initialise import initialise
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.models.spec_drafter.shape import has_own_output, make_config
from drafttrain.models.state_drafter import StateDrafter, copy_layers, fit_start
from drafttrain.models.state_drafter import make_config as make_state_config
from tests.tiny_models import VOCAB, tiny_model

MASK = 3
"""The token that stands for a mask."""


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


def told_states(target: PreTrainedModel, family: str = "marian", **settings) -> BlockDrafter:
    """A Spec-Drafter that is told the target's states, with a noisy start."""
    drafter = tiny_drafter(family, target_states=True, **settings)
    torch.manual_seed(4)
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:  # cross-attention may be the target's
            own = 0.3 if name.startswith("told.") else 0.02
            parameter.data += own * torch.randn_like(parameter)
    return make_drafter(drafter, target)


def block_heads(k: int = 4, std: float | None = 0.5, **settings) -> BlockHeads:
    """Heads on a tiny model of width 16, random ones unless std is None."""
    shape = {"hidden_size": 16, "ffn_size": 6, "vocab_size": VOCAB}
    torch.manual_seed(2)
    heads = BlockHeads(BlockHeadsConfig(k=k, **shape | settings)).double().eval()
    for parameter in heads.parameters() if std is not None else ():
        parameter.data.normal_(std=std)
    return heads


def parallel(
    family: str = "llama", k: int = 4, seed: int = 7, **changes: object
) -> ParallelDrafter:
    """A drafter through masks whose rows depend much on what stands before them."""
    model = tiny_model(family, seed=seed, initializer_range=0.6, **changes)
    model.lm_head.weight.data.normal_()  # an end is as likely as any other token
    model.config.pard_token, model.config.k = MASK, k
    return make_drafter(model)


def noisy(model: PreTrainedModel, family: str, scale: float = 0.15) -> PreTrainedModel:
    """A drafter that is right about some tokens: the target's weights with noise."""
    drafter = tiny_model(family)
    drafter.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    for parameter in drafter.parameters():
        parameter.data += scale * parameter.data.std().nan_to_num(0.0) * torch.randn_like(parameter)
    return drafter


def behind_states(
    target: PreTrainedModel, layers: Sequence[int], mode: str = "blocks", k: int = 4
) -> StateDrafter:
    """Layers of a decoder-only target behind its states, with maps fitted along random texts.

    mode: blocks, linked (blocks whose slots are told the token before them) or tokens.
    """
    shape = {"k": k, "drafts": "tokens" if mode == "tokens" else "blocks"}
    rank = 5 if mode == "linked" else 0
    config = make_state_config(target.config, layers, (0, -1), **shape, previous_token_rank=rank)
    torch.manual_seed(3)
    drafter = StateDrafter(config).double().eval()
    copy_layers(drafter, target)
    size = target.config.vocab_size
    texts = [(draw(3, size), draw(12, size)) for _ in range(6)]
    fit_start(drafter, target, texts)
    with torch.no_grad():
        drafter.slots.normal_(std=0.3)
        if drafter.previous_token is not None:
            drafter.previous_token.out.weight.normal_()
    return drafter


def draw(count: int, size: int) -> list[int]:
    return torch.randint(2, size, (count,)).tolist()
