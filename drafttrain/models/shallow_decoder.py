"""A shallow decoder that shares its target's encoder: Whisper's, in the layout of Distil-Whisper.

It is a `WhisperForCausalLM` (Transformers' `AutoModelForCausalLM`): some decoder layers and an
output projection. Its config.json keeps the sizes of the target's encoder, whose output it reads.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, WhisperConfig, WhisperForCausalLM

from drafttrain.models.language_models import spread, take_layers

PREFIXES = ("model.decoder.", "proj_out.")
"""What the names of a Whisper's parameters begin with, where they are its decoder's."""


KEPT_SETTINGS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "suppress_tokens",
)
"""Of the target's generation_config: begin_suppress_tokens count for the first token alone, which
a drafter does not know from others."""
PARTS = {
    "embeddings": re.compile(r"model\.decoder\.embed_tokens\.|proj_out\."),
    "positions": re.compile(r"model\.decoder\.embed_positions\."),
    "cross-keys-values": re.compile(r"model\.decoder\.layers\.\d+\.encoder_attn\.[kv]_proj\."),
}
"""What the names of parameters begin with, by the part that they belong to."""


def shallow_config(
    target: WhisperConfig, layers: int, identity: Mapping[str, str | None] | None = None
) -> WhisperConfig:
    """A decoder of so many layers, all else as the target has it. `identity` records which target
    it is for. Raises ValueError for more layers than the target has."""
    if layers > target.decoder_layers:
        raise ValueError(
            f"{layers} decoder layers are more than the target's {target.decoder_layers}, which "
            "they start from; ask for as many or fewer"
        )
    config = copy.deepcopy(target)
    config.decoder_layers = layers
    config.is_encoder_decoder = False
    config.architectures = [WhisperForCausalLM.__name__]
    if identity is not None:
        config.target = dict(identity)
    return config


@torch.no_grad()
def copy_decoder(target: PreTrainedModel, config: WhisperConfig) -> WhisperForCausalLM:
    """A shallow decoder of `shallow_config` that starts from a Whisper: evenly spaced layers of its
    decoder, the first and the last among them; embeddings, positions, final norm and output
    projection are copied.

    In the target's precision, on its device, in eval mode. Its generation_config suppresses the
    tokens that the target's does.
    """
    taken = spread(config.decoder_layers, target.config.decoder_layers)
    theirs = target.state_dict()
    own = {name: value for name, value in theirs.items() if name.startswith(PREFIXES)}
    own = take_layers(own, "model.decoder.layers.", taken)
    drafter = WhisperForCausalLM(config).to(target.device, target.dtype)
    drafter.load_state_dict(own)
    settings = {name: getattr(target.generation_config, name, None) for name in KEPT_SETTINGS}
    drafter.generation_config = GenerationConfig(**settings)
    return drafter.eval()


def freeze(drafter: WhisperForCausalLM, parts: Sequence[str]) -> None:
    """Leave these of `PARTS` out of training."""
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(not any(PARTS[part].match(name) for part in parts))


def same_cross_layers(drafter: PreTrainedModel, target: PreTrainedModel) -> tuple[int, ...] | None:
    """The target's layers whose keys and values of cross-attention are those of the drafter's, one
    a layer, told by the weights that make them; None where one of them is of no layer."""
    theirs = list(target.get_decoder().layers)
    found = []
    for layer in drafter.get_decoder().layers:
        same = [n for n, other in enumerate(theirs) if _crosses_alike(layer, other)]
        if not same:
            return None
        found.append(same[0])
    return tuple(found)


def _crosses_alike(layer: nn.Module, other: nn.Module) -> bool:
    """Whether two decoder layers make the same keys and values of what an encoder puts out."""
    own, theirs = layer.encoder_attn.state_dict(), other.encoder_attn.state_dict()
    made = [name for name in own if name.startswith(("k_proj.", "v_proj."))]
    return all(
        own[name].dtype == theirs[name].dtype and torch.equal(own[name], theirs[name])
        for name in made
    )
