"""A shallow decoder that shares its target's encoder: Whisper's, in the layout of Distil-Whisper.

It is a `WhisperForCausalLM` (Transformers' `AutoModelForCausalLM`): some decoder layers and an
output projection. Its config.json keeps the sizes of the target's encoder, whose output it reads.
"""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel, WhisperConfig, WhisperForCausalLM

from drafttrain.models.spec_drafter.initialise import spread

PREFIXES = ("model.decoder.", "proj_out.")
"""What the names of a Whisper's parameters begin with, where they are its decoder's."""


def shallow_config(target: WhisperConfig, layers: int) -> WhisperConfig:
    """A decoder of so many layers, all else as the target has it. Raises ValueError for more layers
    than the target has."""
    if layers > target.decoder_layers:
        raise ValueError(
            f"{layers} decoder layers are more than the target's {target.decoder_layers}, which "
            "they start from; ask for as many or fewer"
        )
    config = copy.deepcopy(target)
    config.decoder_layers = layers
    config.is_encoder_decoder = False
    config.architectures = [WhisperForCausalLM.__name__]
    return config


@torch.no_grad()
def copy_decoder(target: PreTrainedModel, layers: int) -> WhisperForCausalLM:
    """A shallow decoder that starts from a Whisper: evenly spaced decoder layers, the first and
    the last among them; embeddings, positions, final norm and output projection are copied.

    In the target's precision, on its device, in eval mode. Raises ValueError as `shallow_config`.
    """
    config = shallow_config(target.config, layers)
    taken = spread(layers, target.config.decoder_layers)
    theirs = target.state_dict()
    own = {name: value for name, value in theirs.items() if name.startswith(PREFIXES)}
    stem = "model.decoder.layers."
    own = {name: value for name, value in own.items() if not name.startswith(stem)}
    for layer, source in enumerate(taken):
        begins = f"{stem}{source}."
        own |= {
            f"{stem}{layer}.{name.removeprefix(begins)}": value
            for name, value in theirs.items()
            if name.startswith(begins)
        }
    drafter = WhisperForCausalLM(config).to(target.device, target.dtype)
    drafter.load_state_dict(own)
    return drafter.eval()
