"""Start a Spec-Drafter from its target: shape, embeddings, encoder and decoder layers.

Growing depth maps target layer floor(i * L_target / L_drafter) to layer i (SpecDec initialises the
encoder from BART-base this way); a shallower decoder takes evenly spaced layers, the first and the
last among them, since the last ones write what the output projection reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import DrafterConfig
from drafttrain.models.spec_drafter.model import SpecDrafter, SpecDrafterConfig
from drafttrain.models.speech import hears


@dataclass
class Account:
    """What became of the drafter's parameters. Names are the drafter's own."""

    loaded: dict[str, str] = field(default_factory=dict)
    """Drafter parameter -> target parameters it was copied from."""
    missing: list[str] = field(default_factory=list)
    """Drafter parameters that start at random."""
    unexpected: list[str] = field(default_factory=list)
    """Target parameters that found no place (layers left out are not counted)."""

    def __str__(self) -> str:
        lines = [f"initialised {len(self.loaded)} parameters from the target"]
        if self.missing:
            lines.append(f"  at random ({len(self.missing)}): {', '.join(self.missing)}")
        if self.unexpected:
            lines.append(
                f"  without a place ({len(self.unexpected)}): {', '.join(self.unexpected)}"
            )
        return "\n".join(lines)


def drafter_shape(config: PretrainedConfig) -> dict:
    """Spec-Drafter fields that follow the target's family. Raises ValueError for other families."""
    if config.model_type not in _FAMILIES:
        raise ValueError(
            f"no Spec-Drafter shape is known for model type {config.model_type!r}; known: "
            f"{', '.join(sorted(_FAMILIES))}"
        )
    return _FAMILIES[config.model_type].shape(config)


def has_own_output(target: PreTrainedModel) -> bool:
    """Whether the target's output rows differ from its embeddings; its configuration can be wrong.

    Raises ValueError where encoder and decoder embed tokens differently: a Spec-Drafter shares one
    table.
    """
    embedding = target.get_input_embeddings().weight
    parts = (target.get_encoder(), target.get_decoder())
    tables = [part.get_input_embeddings() for part in parts]
    for own in (table.weight for table in tables if isinstance(table, nn.Embedding)):
        if own.shape != embedding.shape or not torch.equal(own, embedding):
            raise ValueError(
                "the target's encoder and decoder have embeddings of their own; a Spec-Drafter "
                "needs a shared table"
            )
    output = target.get_output_embeddings().weight
    return output.shape != embedding.shape or not torch.equal(output, embedding)


def make_config(
    target: PretrainedConfig,
    settings: DrafterConfig,
    mask_id: int | None,
    identity: dict | None = None,
    untied_output: bool | None = None,
) -> SpecDrafterConfig:
    """The drafter's configuration for a target. `identity` records which target it is for.

    untied_output is read off the target's configuration where it is not given; `has_own_output`
    reads it off the weights. Raises ConfigError for a width that is not the target's but is to
    start from its weights, and for one that its heads do not fit in.
    """
    shape = drafter_shape(target)
    if untied_output is not None:
        shape["untied_output"] = untied_output
    shape["encoder"] = _choose_encoder(target, settings)
    if shape["encoder"] == "target":
        shape["encoder_layers"] = 0
    shape["source_width"] = shape["d_model"]
    if settings.encoder_layers is not None:
        shape["encoder_layers"] = settings.encoder_layers
    shape |= _resized(shape, settings)
    if shape["encoder"] == "own":
        shape["source_width"] = shape["d_model"]
    if (settings.output_tokens or 1) > shape["vocab_size"]:
        raise ConfigError(
            f"drafter.output_tokens = {settings.output_tokens} is more than the target's "
            f"{shape['vocab_size']} tokens; give fewer, or leave it out"
        )
    if shape["encoder"] == "target" and settings.initialise == "both":
        depth = getattr(target, _FAMILIES[target.model_type].decoder_layers)
        shape["cross_layers"] = spread(settings.decoder_layers, depth)
    given = {"decoder_layers", "dropout", "k", "slots", "prefix_attention", "soft_copy"}
    given |= {"output_tokens", "source_pooling"}
    return SpecDrafterConfig(
        **shape,
        **settings.model_dump(include=given | {"previous_token_rank"}),
        mask_id=mask_id,
        pad_token_id=target.pad_token_id,
        eos_token_id=target.eos_token_id,
        decoder_start_token_id=target.decoder_start_token_id,
        target=identity,
    )


def _choose_encoder(target: PretrainedConfig, settings: DrafterConfig) -> str:
    """Whose encoder the drafter reads. Raises ConfigError for one that cannot be."""
    heard = hears(target)
    chosen = settings.encoder or ("target" if heard else "own")
    if chosen == "own" and heard:
        raise ConfigError(
            f"drafter.encoder = 'own', but the inputs of a {target.model_type!r} model are audio, "
            "which a Spec-Drafter does not encode; use drafter.encoder=target"
        )
    if chosen == "target" and settings.encoder_layers is not None:
        raise ConfigError(
            f"drafter.encoder_layers = {settings.encoder_layers} counts for an encoder of its own, "
            "but the drafter reads the target's; leave it out, or use drafter.encoder=own"
        )
    if chosen == "own" and settings.source_pooling != 1:
        raise ConfigError(
            f"drafter.source_pooling = {settings.source_pooling} pools what the target's encoder "
            "puts out, but the drafter has an encoder of its own; leave it out, or use "
            "drafter.encoder=target"
        )
    return chosen


def _resized(shape: dict, settings: DrafterConfig) -> dict:
    """The fields of a shape that change with its width, its heads and its feed-forward layers."""
    sizes = {"d_model", "attention_heads", "ffn_dim"}
    asked = settings.model_dump(include=sizes, exclude_none=True)
    other = [name for name, value in asked.items() if value != shape[name]]
    if other and settings.initialise != "none":
        name = other[0]
        raise ConfigError(
            f"drafter.{name} = {asked[name]} is not the target's {shape[name]}, so no part can "
            f"start from its weights, but drafter.initialise={settings.initialise}; set it to none"
        )
    changed = _widened(shape, asked["d_model"]) if "d_model" in asked else {}
    changed |= asked
    if "attention_heads" in other:
        width, heads = changed.get("d_model", shape["d_model"]), asked["attention_heads"]
        if width % heads:
            raise ConfigError(
                f"drafter.attention_heads = {heads} does not divide the width {width}; give a "
                "number that does"
            )
        changed["head_dim"] = width // heads
    return changed


def _widened(shape: dict, width: int) -> dict:
    """The fields of a shape at another width: heads as large, feed-forward layers in proportion."""
    before = shape["d_model"]
    heads, left = divmod(shape["attention_heads"] * width, before)
    if left:
        raise ConfigError(
            f"drafter.d_model = {width} does not hold whole heads of the target's "
            f"({shape['attention_heads']} in {before}); give a multiple of "
            f"{before // math.gcd(before, shape['attention_heads'])}"
        )
    grown = width / before
    return {
        "d_model": width,
        "attention_heads": heads,
        "ffn_dim": round(shape["ffn_dim"] * grown),
        "embedding_scale": _scaled(shape.get("embedding_scale", 1.0), grown**0.5),
        "logit_scale": _scaled(shape.get("logit_scale", 1.0), grown**-0.5),
    }


def _scaled(value: float, factor: float) -> float:
    return value if value == 1.0 else value * factor


def initialise(drafter: SpecDrafter, target: PreTrainedModel, parts: str) -> Account:
    """Copy the target's weights into the drafter: parts is none, encoder or both.

    Embeddings and output rows come with `encoder` and `both`. Every target parameter is either
    copied, belongs to a layer or part that is left out on purpose, or is named `unexpected`.
    """
    account = Account()
    own = drafter.state_dict()
    if parts != "none":
        theirs = target.state_dict()
        wanted = _sources(drafter.config, target.config)
        if parts == "encoder":
            wanted = {k: v for k, v in wanted.items() if not k.startswith("decoder.")}
        used: set[str] = set()
        for name, sources in wanted.items():
            present = [source for source in sources if source in theirs]
            if name not in own or not present:
                continue
            # keys alone may lack a bias (Whisper)
            none = torch.zeros_like(theirs[present[0]])
            value = torch.cat([theirs.get(source, none) for source in sources])
            _copy(own[name], value, name, sources)
            account.loaded[name] = " + ".join(sources)
            used.update(present)
        elsewhere = {"encoder": ".decoder."}.get(parts)
        left = [name for name in theirs if not (elsewhere and elsewhere in f".{name}")]
        if drafter.encoder is None:
            left = [name for name in left if ".encoder." not in f".{name}"]
        account.unexpected = [name for name in left if _homeless(name, used, theirs)]
    drawn = (name for name, _ in drafter.named_parameters())
    account.missing = [name for name in drawn if name not in account.loaded]
    return account


def spread(own: int, theirs: int) -> list[int]:
    """Which target layer each drafter layer starts from."""
    if own >= theirs:
        return [i * theirs // own for i in range(own)]
    if own == 1:
        return [theirs - 1]
    return [round(i * (theirs - 1) / (own - 1)) for i in range(own)]


@torch.no_grad()
def _copy(own: Tensor, value: Tensor, name: str, sources: list[str]) -> None:
    if name == "embedding.weight":  # the mask row, where it is one of its own, stays random
        rows = min(len(own), len(value))
        own[:rows].copy_(value[:rows])
        return
    if name == "logits_bias":  # [1, V] in the target
        value = value.squeeze(0)
    if own.shape != value.shape:
        raise ValueError(
            f"drafter parameter {name} has shape {tuple(own.shape)}, but {' + '.join(sources)} of "
            f"the target has {tuple(value.shape)}; set drafter.initialise=none or report the model"
        )
    own.copy_(value)


def _homeless(name: str, used: set[str], theirs: dict[str, Tensor]) -> bool:
    if name in used:
        return False
    value = theirs[name]
    alike = (theirs[other] for other in used if theirs[other].shape == value.shape)
    if any(torch.equal(value, other) for other in alike):  # tied to one that was copied
        return False
    return not any(part in name for part in (".layers.", ".block.", "embed_positions"))


def _bart_shape(config: PretrainedConfig) -> dict:
    if config.model_type == "marian" and not config.share_encoder_decoder_embeddings:
        raise ValueError(
            "this Marian model has separate source and target vocabularies "
            "(share_encoder_decoder_embeddings=false); a Spec-Drafter needs a shared one"
        )
    pre_norm = config.model_type in ("mbart", "pegasus")
    learned = config.model_type in ("bart", "mbart")
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "encoder_layers": config.encoder_layers,
        "attention_heads": config.encoder_attention_heads,
        "ffn_dim": config.encoder_ffn_dim,
        "activation": config.activation_function,
        "norm": "layer",
        "norm_position": "pre" if pre_norm else "post",
        "bias": True,
        "positions": "learned" if learned else "sinusoidal",
        "max_positions": config.max_position_embeddings,
        "position_offset": 2 if learned else 0,
        "embedding_scale": config.d_model**0.5 if config.scale_embedding else 1.0,
        "embedding_norm": learned,
        "untied_output": not config.tie_word_embeddings,
        "logits_bias": True,
    }


def _whisper_shape(config: PretrainedConfig) -> dict:
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "attention_heads": config.decoder_attention_heads,
        "ffn_dim": config.decoder_ffn_dim,
        "activation": config.activation_function,
        "norm": "layer",
        "norm_position": "pre",
        "bias": True,
        "positions": "learned",
        "max_positions": config.max_target_positions,
        "embedding_scale": config.d_model**0.5 if config.scale_embedding else 1.0,
        "untied_output": not config.tie_word_embeddings,
    }


def _t5_shape(config: PretrainedConfig) -> dict:
    # T5 v1.0 ties its output rows and scales them; v1.1, FLAN and mT5 do neither
    scaled = getattr(config, "scale_decoder_outputs", config.tie_word_embeddings)
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "encoder_layers": config.num_layers,
        "attention_heads": config.num_heads,
        "head_dim": config.d_kv,
        "ffn_dim": config.d_ff,
        "activation": config.dense_act_fn,
        "gated_ffn": config.is_gated_act,
        "norm": "rms",
        "norm_position": "pre",
        "norm_eps": config.layer_norm_epsilon,
        "bias": False,
        "positions": "relative",
        "relative_buckets": config.relative_attention_num_buckets,
        "relative_max_distance": config.relative_attention_max_distance,
        "attention_scale": 1.0,
        "logit_scale": config.d_model**-0.5 if scaled else 1.0,
        "untied_output": not scaled,
    }


@dataclass(frozen=True)
class _Family:
    """How targets of some model types are read."""

    shape: Callable[[PretrainedConfig], dict]
    layer: str
    """Name of one of the target's layers."""
    decoder_layers: str
    """Where its configuration counts those of the decoder."""
    modules: dict[str, tuple[str, ...]]
    """The drafter's module -> the target's that it holds, one after the other."""


_BART = _Family(
    _bart_shape,
    "model.{part}.layers.{number}",
    "decoder_layers",
    {
        "embedding": ("model.shared",),
        "output": ("lm_head",),
        "logits_bias": ("final_logits_bias",),
        "{part}.learned_positions": ("model.{part}.embed_positions",),
        "{part}.embedding_norm": ("model.{part}.layernorm_embedding",),
        "{part}.final_norm": ("model.{part}.layer_norm",),
        "{own}.self_attention.qkv": tuple(f"{{layer}}.self_attn.{x}_proj" for x in "qkv"),
        "{own}.self_attention.out": ("{layer}.self_attn.out_proj",),
        "{own}.self_norm": ("{layer}.self_attn_layer_norm",),
        "{own}.cross_attention.query": ("{layer}.encoder_attn.q_proj",),
        "{own}.cross_attention.kv": tuple(f"{{layer}}.encoder_attn.{x}_proj" for x in "kv"),
        "{own}.cross_attention.out": ("{layer}.encoder_attn.out_proj",),
        "{own}.cross_norm": ("{layer}.encoder_attn_layer_norm",),
        "{own}.feed_forward.up": ("{layer}.fc1",),
        "{own}.feed_forward.down": ("{layer}.fc2",),
        "{own}.feed_forward_norm": ("{layer}.final_layer_norm",),
    },
)
_WHISPER = _Family(
    _whisper_shape,
    _BART.layer,
    _BART.decoder_layers,
    _BART.modules | {"embedding": ("model.decoder.embed_tokens",), "output": ("proj_out",)},
)
_T5 = _Family(
    _t5_shape,
    "{part}.block.{number}.layer",
    "num_decoder_layers",
    {
        "embedding": ("shared",),
        "output": ("lm_head",),
        "{part}.relative_bias.embedding": (
            "{part}.block.0.layer.0.SelfAttention.relative_attention_bias",
        ),
        "{part}.final_norm": ("{part}.final_layer_norm",),
        "{own}.self_attention.qkv": tuple(f"{{layer}}.0.SelfAttention.{x}" for x in "qkv"),
        "{own}.self_attention.out": ("{layer}.0.SelfAttention.o",),
        "{own}.self_norm": ("{layer}.0.layer_norm",),
        "{own}.cross_attention.query": ("{layer}.1.EncDecAttention.q",),
        "{own}.cross_attention.kv": tuple(f"{{layer}}.1.EncDecAttention.{x}" for x in "kv"),
        "{own}.cross_attention.out": ("{layer}.1.EncDecAttention.o",),
        "{own}.cross_norm": ("{layer}.1.layer_norm",),
        "{own}.feed_forward.up": ("{layer}.{last}.DenseReluDense.{up}",),
        "{own}.feed_forward.gate": ("{layer}.{last}.DenseReluDense.wi_0",),
        "{own}.feed_forward.down": ("{layer}.{last}.DenseReluDense.wo",),
        "{own}.feed_forward_norm": ("{layer}.{last}.layer_norm",),
    },
)
_FAMILIES = dict.fromkeys(("marian", "bart", "mbart", "pegasus"), _BART)
_FAMILIES |= dict.fromkeys(("t5", "mt5"), _T5) | {"whisper": _WHISPER}


def _sources(own: SpecDrafterConfig, target: PretrainedConfig) -> dict[str, list[str]]:
    """Drafter parameter -> target parameters that it starts from, one after the other.

    Of all that models of the family may have; each lacks some.
    """
    family = _FAMILIES[target.model_type]
    decoder = ("decoder", 2, own.decoder_layers, getattr(target, family.decoder_layers))
    encoder = ("encoder", 1, own.encoder_layers, target.num_hidden_layers)
    sources = {}
    for part, last, depth, target_depth in (decoder, encoder)[: 1 + (own.encoder == "own")]:
        for i, number in enumerate(spread(depth, target_depth)):
            places = {
                "part": part,
                "own": f"{part}.layers.{i}",
                "layer": family.layer.format(part=part, number=number),
                "last": last,
                "up": "wi_1" if own.gated_ffn else "wi",
            }
            for name, theirs in family.modules.items():
                for kind in ("", ".weight", ".bias"):
                    found = [module.format(**places) + kind for module in theirs]
                    sources[name.format(**places) + kind] = found
    return sources
