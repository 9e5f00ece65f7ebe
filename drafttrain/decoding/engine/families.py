"""How the parts of each known family are read as a `Stack`: decoders, and encoders of texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import (
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    OPTForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    T5ForConditionalGeneration,
)

from drafttrain.decoding.engine.architectures import (
    BART_LIKE,
    ROTARY,
    T5_LIKE,
    WHISPER_LIKE,
)
from drafttrain.decoding.engine.products import Linear
from drafttrain.decoding.engine.reading import (
    cross_attention,
    layer_norm,
    linear,
    rms_norm,
    self_attention,
    turned,
)
from drafttrain.decoding.engine.stack import (
    CrossAttention,
    FeedForward,
    Layer,
    SelfAttention,
    Stack,
)
from drafttrain.models.layout import column_major


@torch.no_grad()
def read_stack(model: PreTrainedModel) -> Stack:
    """The decoder of a model of a known family (`architectures.KNOWN`)."""
    kind = type(model)
    if kind in BART_LIKE:
        return _bart(model)
    if kind in WHISPER_LIKE:
        return _whisper(model)
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


@torch.no_grad()
def read_encoder(model: PreTrainedModel) -> Stack | None:
    """The encoder of a model of a family that reads texts; None: of another."""
    if type(model) in BART_LIKE:
        return _bart_part(model.get_encoder(), *_bart_kind(model))
    if type(model) in T5_LIKE:
        return _t5_part(model.get_encoder(), model.config)
    return None


def _bart(model: PreTrainedModel) -> Stack:
    head = Linear(model.lm_head.weight.detach(), model.final_logits_bias[0])
    return replace(_bart_part(model.get_decoder(), *_bart_kind(model)), output=head)


def _bart_kind(model: PreTrainedModel) -> tuple[bool, float]:
    """Where the norms of a BART-like model stand, and how its embedded tokens are scaled."""
    config = model.config
    scale = config.d_model**0.5 if config.scale_embedding else 1.0
    return config.model_type in ("mbart", "pegasus"), scale


def _whisper(model: PreTrainedModel) -> Stack:
    """The decoder never scales embedded tokens, whatever its configuration says."""
    return replace(_bart_part(model.get_decoder(), True, 1.0), output=linear(model.proj_out))


def _bart_part(part: nn.Module, pre: bool, scale: float) -> Stack:
    """The encoder or the decoder of a BART-like model, or the decoder of a Whisper.

    pre: norms stand in front of the layers' parts.
    """
    layers = []
    for layer in part.layers:
        across = getattr(layer, "encoder_attn", None)
        layers.append(
            Layer(
                self_attention(layer.self_attn),
                layer_norm(layer.self_attn_layer_norm),
                FeedForward(linear(layer.fc1), linear(layer.fc2), layer.activation_fn),
                layer_norm(layer.final_layer_norm),
                pre,
                None if across is None else cross_attention(across),
                None if across is None else layer_norm(layer.encoder_attn_layer_norm),
            )
        )
    norm = getattr(part, "layernorm_embedding", None)
    return Stack(
        embedding=part.embed_tokens.weight.detach(),
        layers=layers,
        scale=scale,
        positions=part.embed_positions.weight.detach(),
        offset=getattr(part.embed_positions, "offset", 0),
        embedding_norm=None if norm is None else layer_norm(norm),
        final_norm=layer_norm(part.layer_norm) if pre else None,
    )


def _t5(model: PreTrainedModel) -> Stack:
    config = model.config
    scaled = type(model) is T5ForConditionalGeneration and config.scale_decoder_outputs
    return replace(
        _t5_part(model.get_decoder(), config),
        output=linear(model.lm_head),
        output_scale=config.d_model**-0.5 if scaled else 1.0,
    )


def _t5_part(part: nn.Module, config: PretrainedConfig) -> Stack:
    """The encoder or the decoder of a T5-like model."""
    layers = []
    for block in part.block:
        own, *across, last = block.layer
        attention, dense = own.SelfAttention, last.DenseReluDense
        ups = (dense.wi_0, dense.wi_1) if config.is_gated_act else (dense.wi,)
        heads = attention.n_heads
        qkv = linear(attention.q, attention.k, attention.v)
        cross = cross_norm = None
        if across:
            found = across[0].EncDecAttention
            keys_values = linear(found.k, found.v)
            cross = CrossAttention(linear(found.q), keys_values, linear(found.o), heads, 1.0)
            cross_norm = rms_norm(across[0].layer_norm, "t5")
        layers.append(
            Layer(
                SelfAttention(qkv, linear(attention.o), heads, heads, 1.0),
                rms_norm(own.layer_norm, "t5"),
                FeedForward(linear(*ups), linear(dense.wo), dense.act, config.is_gated_act),
                rms_norm(last.layer_norm, "t5"),
                True,
                cross,
                cross_norm,
            )
        )
    bias, first = _by_distance(part.block[0].layer[0].SelfAttention)
    return Stack(
        embedding=part.embed_tokens.weight.detach(),
        layers=layers,
        final_norm=rms_norm(part.final_layer_norm, "t5"),
        distance_bias=bias,
        first_distance=first,
    )


def _by_distance(attention: nn.Module) -> tuple[Tensor, int]:
    """What T5-like models add to scores by the distance back to a key, and the first distance.

    From the model's own middle row; beyond the greatest distance that it tells apart all are alike.
    Shapes: [heads, P].
    """
    reach = attention.relative_attention_max_distance
    row = attention.compute_bias(1, 2 * reach + 1, past_seen_tokens=reach)[0, :, 0]
    return row.flip(-1).contiguous(), -reach


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
                    *(None if norm is None else rms_norm(norm, "rms-float32") for norm in norms),
                ),
                rms_norm(layer.input_layernorm, "rms-float32"),
                FeedForward(
                    linear(mlp.gate_proj, mlp.up_proj), linear(mlp.down_proj), mlp.act_fn, True
                ),
                rms_norm(layer.post_attention_layernorm, "rms-float32"),
                True,
            )
        )
    return Stack(
        embedding=body.embed_tokens.weight.detach(),
        layers=layers,
        output=linear(model.lm_head),
        final_norm=rms_norm(body.norm, "rms-float32"),
    )


def _gpt2(model: PreTrainedModel) -> Stack:
    body = model.transformer
    layers = []
    for block in body.h:
        own = block.attn
        layers.append(
            Layer(
                SelfAttention(
                    turned(own.c_attn),
                    turned(own.c_proj),
                    own.num_heads,
                    own.num_heads,
                    own.scaling,
                ),
                layer_norm(block.ln_1),
                FeedForward(turned(block.mlp.c_fc), turned(block.mlp.c_proj), block.mlp.act),
                layer_norm(block.ln_2),
                True,
            )
        )
    return Stack(
        embedding=body.wte.weight.detach(),
        layers=layers,
        output=linear(model.lm_head),
        positions=body.wpe.weight.detach(),
        final_norm=layer_norm(body.ln_f),
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
                layer_norm(layer.input_layernorm),
                FeedForward(linear(mlp.dense_h_to_4h), linear(mlp.dense_4h_to_h), mlp.act),
                layer_norm(layer.post_attention_layernorm),
                True,
                parallel=config.use_parallel_residual,
            )
        )
    return Stack(
        embedding=body.embed_in.weight.detach(),
        layers=layers,
        output=linear(model.get_output_embeddings()),
        final_norm=layer_norm(body.final_layer_norm),
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
                self_attention(layer.self_attn),
                layer_norm(layer.self_attn_layer_norm),
                FeedForward(linear(layer.fc1), linear(layer.fc2), layer.activation_fn),
                layer_norm(layer.final_layer_norm),
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
        final_norm=None if norm is None else layer_norm(norm),
    )
