"""How the encoder and the decoder of a Spec-Drafter are read as a `Stack`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from drafttrain.decoding.engine.products import Forked, Linear, Product
from drafttrain.decoding.engine.reading import linear
from drafttrain.decoding.engine.stack import (
    CrossAttention,
    FeedForward,
    Layer,
    Norm,
    SelfAttention,
    Stack,
    Told,
)
from drafttrain.models.layout import column_major
from drafttrain.models.spec_drafter import layers as modules
from drafttrain.models.spec_drafter.model import SpecDrafter


@torch.no_grad()
def read_drafter(model: SpecDrafter) -> tuple[Stack | None, Stack]:
    """Its encoder, where it has one, and its decoder."""
    weight, bias = model.output_rows()
    output = Linear(column_major(weight.detach()), bias)
    told, few = model.told, model.config.output_tokens is not None
    decoder = replace(
        _part(model, model.decoder),
        output=output,
        output_scale=model.config.logit_scale,
        draftable=model.draftable if few else None,
        vocabulary=model.config.vocab_size if few else None,
        told=None if told is None else Told(linear(told.of_state), linear(told.of_token)),
    )
    return None if model.encoder is None else _part(model, model.encoder), decoder


def _part(model: SpecDrafter, part: modules.Stack) -> Stack:
    config = model.config
    bias, first = (None, 0) if part.relative_bias is None else _by_distance(part.relative_bias)
    positions, offset = None, 0
    if part.learned_positions is not None:
        positions, offset = part.learned_positions.weight.detach(), config.position_offset
    elif bias is None:
        positions = part.sinusoids
    return Stack(
        embedding=model.embedding.weight.detach(),
        layers=[_layer(layer) for layer in part.layers],
        scale=config.embedding_scale,
        positions=positions,
        offset=offset,
        embedding_norm=None if part.embedding_norm is None else _norm(part.embedding_norm),
        final_norm=None if part.final_norm is None else _norm(part.final_norm),
        slot_id=config.mask_id if part.layers[0].slots is not None else None,
        distance_bias=bias,
        first_distance=first,
    )


def _layer(layer: modules.Layer) -> Layer:
    own, across, feed = layer.self_attention, layer.cross_attention, layer.feed_forward

    def product(*names: str) -> Product:
        """Of parts of the layer that read the same, with those that slots have for themselves."""
        of_tokens = [layer.get_submodule(name) for name in names]
        if layer.slots is None:
            return linear(*of_tokens)
        of_slots = [layer.slots.get_submodule(name) for name in names]
        return Forked(linear(*of_tokens), linear(*of_slots))

    cross = cross_norm = None
    if across is not None:
        query, out = product("cross_attention.query"), product("cross_attention.out")
        cross = CrossAttention(query, linear(across.kv), out, across.heads, across.scale)
        cross_norm = _norm(layer.cross_norm)
    ups = ["feed_forward.up"] if feed.gate is None else ["feed_forward.gate", "feed_forward.up"]
    qkv, mixed = product("self_attention.qkv"), product("self_attention.out")
    return Layer(
        SelfAttention(qkv, mixed, own.heads, own.heads, own.scale),
        _norm(layer.self_norm),
        FeedForward(product(*ups), product("feed_forward.down"), feed.activation, len(ups) == 2),
        _norm(layer.feed_forward_norm),
        layer.pre_norm,
        cross,
        cross_norm,
    )


def _norm(module: nn.Module) -> Norm:
    bias = None if module.bias is None else module.bias.detach()
    weight = module.weight.detach()
    return Norm("rms" if bias is None else "layer", len(weight), weight, bias, module.eps)


def _by_distance(module: modules.RelativeBias) -> tuple[Tensor, int]:
    """What is added to scores by the distance back to a key, and the first distance: [heads, P]."""
    reach = module.max_distance
    places = torch.arange(2 * reach + 1, device=module.embedding.weight.device)[None]
    row = module(places[:, reach : reach + 1], places)[0, :, 0]
    return row.flip(-1).contiguous(), -reach
