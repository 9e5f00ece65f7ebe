"""How the decoder of each known family is read as a `Stack`.

Weights stay the model's own where they can; queries, keys and values (and gate and up) of a layer
are put into one matrix. How matrices lie in memory is left to `products.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import (
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    OPTForCausalLM,
    PreTrainedModel,
    T5ForConditionalGeneration,
)

from drafttrain.decoding.engine.architectures import BART_LIKE, ROTARY, T5_LIKE
from drafttrain.decoding.engine.products import Linear
from drafttrain.decoding.engine.stack import (
    CrossAttention,
    FeedForward,
    Layer,
    Norm,
    SelfAttention,
    Stack,
)
from drafttrain.models.layout import column_major
from drafttrain.models.spec_drafter.model import SpecDrafter

COPIED = 2**23
"""Most numbers of weights that are put side by side in a copy."""


@torch.no_grad()
def read_stack(model: PreTrainedModel) -> Stack:
    """The decoder of a model of a known family (`architectures.KNOWN`)."""
    kind = type(model)
    if kind in BART_LIKE:
        return _bart(model)
    if kind in T5_LIKE:
        return _t5(model)
    if kind in ROTARY:
        return _rotary(model)
    others: dict[type, Callable[[PreTrainedModel], Stack]] = {
        GPT2LMHeadModel: _gpt2,
        GPTNeoXForCausalLM: _gpt_neox,
        OPTForCausalLM: _opt,
    }
    return others[kind](model)


def linear(*modules: nn.Linear) -> Linear:
    """The product of a layer; of several that read the same, one for all where they are small.

    One product for all takes a copy of their weights, which saves nothing where they are large.
    """
    parts = [
        Linear(module.weight.detach(), None if module.bias is None else module.bias.detach())
        for module in modules
    ]
    if len(parts) == 1:
        return parts[0]
    if sum(part.weight.numel() for part in parts) > COPIED:
        return Linear.side_by_side(parts)
    weight, bias = torch.cat([part.weight for part in parts]), None
    if any(part.bias is not None for part in parts):
        bias = torch.cat(
            [weight.new_zeros(len(p.weight)) if p.bias is None else p.bias for p in parts]
        )
    return Linear(column_major(weight), bias)


def _turned(module: nn.Module) -> Linear:
    """GPT-2's Conv1D, whose weight is [in, out]."""
    return Linear(module.weight.detach().t(), module.bias.detach())


def _layer_norm(module: nn.LayerNorm) -> Norm:
    weight, bias = (None if one is None else one.detach() for one in (module.weight, module.bias))
    return Norm("layer", module.normalized_shape[0], weight, bias, module.eps)


def _rms_norm(module: nn.Module, kind: str) -> Norm:
    weight = module.weight.detach()
    return Norm(kind, len(weight), weight, None, module.variance_epsilon)


def _self_attention(module: nn.Module) -> SelfAttention:
    """Of a BART-like decoder, or an OPT."""
    heads, qkv = module.num_heads, linear(module.q_proj, module.k_proj, module.v_proj)
    return SelfAttention(qkv, linear(module.out_proj), heads, heads, module.scaling)


def _bart(model: PreTrainedModel) -> Stack:
    decoder, config = model.get_decoder(), model.config
    pre = config.model_type in ("mbart", "pegasus")
    layers = []
    for layer in decoder.layers:
        across = layer.encoder_attn
        layers.append(
            Layer(
                _self_attention(layer.self_attn),
                _layer_norm(layer.self_attn_layer_norm),
                FeedForward(linear(layer.fc1), linear(layer.fc2), layer.activation_fn),
                _layer_norm(layer.final_layer_norm),
                pre,
                CrossAttention(
                    linear(across.q_proj),
                    linear(across.k_proj, across.v_proj),
                    linear(across.out_proj),
                    across.num_heads,
                    across.scaling,
                ),
                _layer_norm(layer.encoder_attn_layer_norm),
            )
        )
    norm = getattr(decoder, "layernorm_embedding", None)
    head = model.lm_head.weight.detach()
    return Stack(
        embedding=decoder.embed_tokens.weight.detach(),
        layers=layers,
        output=Linear(head, model.final_logits_bias[0]),
        scale=config.d_model**0.5 if config.scale_embedding else 1.0,
        positions=decoder.embed_positions.weight.detach(),
        offset=getattr(decoder.embed_positions, "offset", 0),
        embedding_norm=None if norm is None else _layer_norm(norm),
        final_norm=_layer_norm(decoder.layer_norm) if pre else None,
    )


def _t5(model: PreTrainedModel) -> Stack:
    decoder, config = model.get_decoder(), model.config
    layers = []
    for block in decoder.block:
        own, across, last = block.layer
        attention, cross, dense = own.SelfAttention, across.EncDecAttention, last.DenseReluDense
        ups = (dense.wi_0, dense.wi_1) if config.is_gated_act else (dense.wi,)
        heads = attention.n_heads
        layers.append(
            Layer(
                SelfAttention(
                    linear(attention.q, attention.k, attention.v),
                    linear(attention.o),
                    heads,
                    heads,
                    1.0,
                ),
                _rms_norm(own.layer_norm, "t5"),
                FeedForward(linear(*ups), linear(dense.wo), dense.act, config.is_gated_act),
                _rms_norm(last.layer_norm, "t5"),
                True,
                CrossAttention(
                    linear(cross.q), linear(cross.k, cross.v), linear(cross.o), heads, 1.0
                ),
                _rms_norm(across.layer_norm, "t5"),
            )
        )
    scaled = type(model) is T5ForConditionalGeneration and config.scale_decoder_outputs
    first = decoder.block[0].layer[0].SelfAttention
    return Stack(
        embedding=decoder.embed_tokens.weight.detach(),
        layers=layers,
        output=linear(model.lm_head),
        final_norm=_rms_norm(decoder.final_layer_norm, "t5"),
        distance_bias=_by_distance(first),
        output_scale=config.d_model**-0.5 if scaled else 1.0,
    )


def _by_distance(attention: nn.Module) -> Tensor:
    """What a T5-like decoder adds to its scores, by the distance back to a key: [heads, P].

    From the model's own last row; beyond the greatest distance that it tells apart all are alike.
    """
    length = attention.relative_attention_max_distance + 1
    row = attention.compute_bias(1, length, past_seen_tokens=length - 1)[0, :, 0]
    return row.flip(-1).contiguous()


def _rotary(model: PreTrainedModel) -> Stack:
    body, config = model.get_decoder(), model.config
    layers = []
    for layer in body.layers:
        own, mlp = layer.self_attn, layer.mlp
        norms = [getattr(own, name, None) for name in ("q_norm", "k_norm")]
        layers.append(
            Layer(
                SelfAttention(
                    linear(own.q_proj, own.k_proj, own.v_proj),
                    linear(own.o_proj),
                    config.num_attention_heads,
                    config.num_key_value_heads,
                    own.scaling,
                    *(None if norm is None else _rms_norm(norm, "rms-float32") for norm in norms),
                ),
                _rms_norm(layer.input_layernorm, "rms-float32"),
                FeedForward(
                    linear(mlp.gate_proj, mlp.up_proj), linear(mlp.down_proj), mlp.act_fn, True
                ),
                _rms_norm(layer.post_attention_layernorm, "rms-float32"),
                True,
            )
        )
    return Stack(
        embedding=body.embed_tokens.weight.detach(),
        layers=layers,
        output=linear(model.lm_head),
        final_norm=_rms_norm(body.norm, "rms-float32"),
    )


def _gpt2(model: PreTrainedModel) -> Stack:
    body = model.transformer
    layers = []
    for block in body.h:
        own = block.attn
        layers.append(
            Layer(
                SelfAttention(
                    _turned(own.c_attn),
                    _turned(own.c_proj),
                    own.num_heads,
                    own.num_heads,
                    own.scaling,
                ),
                _layer_norm(block.ln_1),
                FeedForward(_turned(block.mlp.c_fc), _turned(block.mlp.c_proj), block.mlp.act),
                _layer_norm(block.ln_2),
                True,
            )
        )
    return Stack(
        embedding=body.wte.weight.detach(),
        layers=layers,
        output=linear(model.lm_head),
        positions=body.wpe.weight.detach(),
        final_norm=_layer_norm(body.ln_f),
    )


def _gpt_neox(model: PreTrainedModel) -> Stack:
    body, config = model.gpt_neox, model.config
    heads = config.num_attention_heads
    layers = []
    for layer in body.layers:
        own, mlp = layer.attention, layer.mlp
        layers.append(
            Layer(
                SelfAttention(
                    _apart(own.query_key_value, heads), linear(own.dense), heads, heads, own.scaling
                ),
                _layer_norm(layer.input_layernorm),
                FeedForward(linear(mlp.dense_h_to_4h), linear(mlp.dense_4h_to_h), mlp.act),
                _layer_norm(layer.post_attention_layernorm),
                True,
                parallel=config.use_parallel_residual,
            )
        )
    return Stack(
        embedding=body.embed_in.weight.detach(),
        layers=layers,
        output=linear(model.get_output_embeddings()),
        final_norm=_layer_norm(body.final_layer_norm),
    )


def _apart(module: nn.Linear, heads: int) -> Linear:
    """Rows that lie head by head (query, key, value of each), sorted by what they are."""

    def sort(rows: Tensor) -> Tensor:
        return rows.view(heads, 3, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    bias = None if module.bias is None else sort(module.bias.detach())
    return Linear(column_major(sort(module.weight.detach())), bias)


def _opt(model: PreTrainedModel) -> Stack:
    body = model.get_decoder()
    layers = []
    for layer in body.layers:
        layers.append(
            Layer(
                _self_attention(layer.self_attn),
                _layer_norm(layer.self_attn_layer_norm),
                FeedForward(linear(layer.fc1), linear(layer.fc2), layer.activation_fn),
                _layer_norm(layer.final_layer_norm),
                layer.do_layer_norm_before,
            )
        )
    norm = body.final_layer_norm
    into, out = body.project_in, body.project_out
    return Stack(
        embedding=body.embed_tokens.weight.detach(),
        layers=layers,
        output=linear(model.lm_head),
        project_in=None if into is None else linear(into),
        project_out=None if out is None else linear(out),
        positions=body.embed_positions.weight.detach(),
        offset=body.embed_positions.offset,
        final_norm=None if norm is None else _layer_norm(norm),
    )


@torch.no_grad()
def read_drafter(model: SpecDrafter) -> Stack:
    """The decoder of a Spec-Drafter."""
    config, decoder = model.config, model.decoder
    pre, heads = config.norm_position == "pre", config.attention_heads

    def norm(module: nn.Module) -> Norm:
        bias = None if module.bias is None else module.bias.detach()
        kind = "rms" if bias is None else "layer"
        return Norm(kind, config.d_model, module.weight.detach(), bias, module.eps)

    layers = []
    for layer in decoder.layers:
        own, across, feed = layer.self_attention, layer.cross_attention, layer.feed_forward
        ups = (feed.up,) if feed.gate is None else (feed.gate, feed.up)
        layers.append(
            Layer(
                SelfAttention(linear(own.qkv), linear(own.out), heads, heads, own.scale),
                norm(layer.self_norm),
                FeedForward(linear(*ups), linear(feed.down), feed.activation, len(ups) == 2),
                norm(layer.feed_forward_norm),
                pre,
                CrossAttention(
                    linear(across.query), linear(across.kv), linear(across.out), heads, across.scale
                ),
                norm(layer.cross_norm),
            )
        )
    positions, offset, bias = None, 0, None
    if decoder.learned_positions is not None:
        positions, offset = decoder.learned_positions.weight.detach(), config.position_offset
    elif decoder.relative_bias is None:
        positions = decoder.sinusoids
    else:
        places = torch.arange(config.relative_max_distance + 1, device=model.device)[None]
        bias = decoder.relative_bias(places[:, -1:], places)[0, :, 0].flip(-1).contiguous()
    output = Linear(column_major(model.output_weight().detach()), model.logits_bias)
    return Stack(
        embedding=model.embedding.weight.detach(),
        layers=layers,
        output=output,
        scale=config.embedding_scale,
        positions=positions,
        offset=offset,
        embedding_norm=None if decoder.embedding_norm is None else norm(decoder.embedding_norm),
        final_norm=None if decoder.final_norm is None else norm(decoder.final_norm),
        distance_bias=bias,
        output_scale=config.logit_scale,
    )
