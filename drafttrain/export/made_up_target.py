"""A state drafter behind a made-up target: numbers to compare before and after it is saved."""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.models.state_drafter import StateDrafter


@torch.inference_mode()
def states_behind_made_up(drafter: StateDrafter, slots: int) -> Tensor:
    """Hidden states of so many slots behind one token, all maps and layers in them. [N, D]"""
    config, shape = drafter.config, drafter.decoder.config
    width, depths = config.hidden_size, torch.arange(slots) % config.k
    read = width * len(config.state_layers)
    states, token = torch.linspace(-3.0, 3.0, read + width).to(drafter.dtype).split([read, width])
    token = token.expand(slots, -1)
    said = drafter.of_anchors(states.view(1, -1, width)).expand(slots, -1, -1)
    fed = drafter.fed(said, token, depths)
    heads = shape.num_key_value_heads
    size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    cached = torch.linspace(-1.0, 1.0, heads * size).to(drafter.dtype).view(1, heads, 1, size)
    mask = torch.zeros(1, 1, slots, 1 + slots, dtype=drafter.dtype)
    keys_values = [(cached, cached)] * len(config.context_layers)
    hidden = drafter(fed[None], 1 + torch.arange(slots)[None], mask, keys_values)[0]
    if drafter.previous_token is None:
        return hidden
    return drafter.previous_token(hidden, token, depths > 0)
