"""Tiny drafters: Spec-Drafters, block heads, parallel and state drafters, and noisy copies of a
target."""

from collections.abc import Sequence

import torch
from transformers import MarianConfig, PreTrainedModel

from drafttrain.build.pairs import make_drafter
from drafttrain.config.recipes import DrafterConfig
from drafttrain.data.batches.slots import SlotCollator
from drafttrain.decoding.drafters.parallel import ParallelDrafter
from drafttrain.decoding.engine.teacher_forcing import projection_scale
from drafttrain.models.block_heads import BlockHeads, BlockHeadsConfig
from drafttrain.models.spec_drafter.build import build, empty_drafter, make_config
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.models.spec_drafter.shape import DraftShape, mark
from drafttrain.models.state_drafter import StateDrafter, copy_layers, fit_start
from drafttrain.models.state_drafter import make_config as make_state_config
from tests.tiny_models import VOCAB, tiny_model

MASK = 3
"""The mask token."""


def shared(family: str) -> PreTrainedModel:
    """Returns a tiny target whose encoder and decoder share embeddings, with a separate head."""
    return tiny_model(family, tie_word_embeddings=True)


def tiny_drafter(family: str = "marian", parts: str = "both", **settings) -> SpecDrafter:
    return drafter_of(shared(family), parts, **settings)


def with_noise(drafter: SpecDrafter, noise: float = 0.02) -> SpecDrafter:
    """Adds noise to the weights; a drafter as deep as its target is then right on some tokens."""
    torch.manual_seed(0)
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            parameter.data += noise * torch.randn_like(parameter)
    return drafter


def drafter_of(
    target: PreTrainedModel,
    parts: str = "both",
    identity: dict | None = None,
    draftable: Sequence[int] | None = None,
    **settings,
) -> SpecDrafter:
    """Returns a target's Spec-Drafter in the target's data type, in eval mode, with an embedding
    row of its own for the mask."""
    settings = DrafterConfig(**{"k": 4, "previous_token_rank": 0} | settings)
    scale = projection_scale(target)
    config = make_config(target.config, settings, None, identity, scale)
    config.draftable_tokens = draftable
    torch.manual_seed(0)
    return build(config, target, parts, target.dtype)[0].eval()


def small_drafter(
    vocabulary: int,
    width: int,
    k: int,
    decoder_layers: int = 1,
    ffn: int = 8,
    dropout: float = 0.0,
    draftable: Sequence[int] | None = None,
    **shape,
) -> SpecDrafter:
    """Returns a Spec-Drafter without a target: a random Marian with decoder start token 0."""
    config = MarianConfig(
        vocab_size=vocabulary + 1,
        d_model=width,
        encoder_layers=1,
        decoder_layers=decoder_layers,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=ffn,
        decoder_ffn_dim=ffn,
        max_position_embeddings=32,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=None,
        forced_eos_token_id=None,
        dropout=dropout,
    )
    mark(config, DraftShape(vocabulary, vocabulary, **shape))
    config.k, config.draftable_tokens = k, draftable
    torch.manual_seed(1)
    return empty_drafter(config).double()


def collator(drafter: SpecDrafter, blocks: int) -> SlotCollator:
    """Returns the collator of a Spec-Drafter."""
    config = drafter.config
    start, pad = config.decoder_start_token_id, config.pad_token_id or 0
    return SlotCollator(drafter.shape, config.k, blocks, 0, start, pad)


def block_heads(k: int = 4, std: float | None = 0.5, **settings) -> BlockHeads:
    """Returns heads for a tiny model of width 16, with random weights unless std is None."""
    shape = {"hidden_size": 16, "ffn_size": 6, "vocab_size": VOCAB}
    torch.manual_seed(2)
    heads = BlockHeads(BlockHeadsConfig(k=k, **shape | settings)).double().eval()
    for parameter in heads.parameters() if std is not None else ():
        parameter.data.normal_(std=std)
    return heads


def parallel(
    family: str = "llama", k: int = 4, seed: int = 7, **changes: object
) -> ParallelDrafter:
    """Returns a drafter with mask tokens whose logits depend strongly on the preceding tokens."""
    model = tiny_model(family, seed=seed, initializer_range=0.6, **changes)
    model.lm_head.weight.data.normal_()  # EOS is as likely as any other token
    model.config.pard_token, model.config.k = MASK, k
    return make_drafter(model)


def noisy(model: PreTrainedModel, family: str, scale: float = 0.15) -> PreTrainedModel:
    """Returns a copy of the target with noisy weights, which is right on some tokens."""
    drafter = tiny_model(family)
    drafter.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    for parameter in drafter.parameters():
        parameter.data += scale * parameter.data.std().nan_to_num(0.0) * torch.randn_like(parameter)
    return drafter


def state_drafter(
    target: PreTrainedModel, layers: Sequence[int], mode: str = "blocks", k: int = 4
) -> StateDrafter:
    """Returns a state drafter with layers of a decoder-only target, fitted on random texts.

    mode: blocks, or linked (with previous-token features).
    """
    rank = 5 if mode == "linked" else 0
    config = make_state_config(target.config, layers, (0, -1), k=k, previous_token_rank=rank)
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
