"""What a state drafter can be made of: settings of its recipe against the target's config.json."""

from __future__ import annotations

from transformers import PretrainedConfig

from drafttrain import __version__
from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import StateDrafterRecipe
from drafttrain.models.causal_drafter import check_losses
from drafttrain.models.loading import check_target
from drafttrain.models.state_drafter import StateDrafterConfig, make_config


def check_state_recipe(settings: StateDrafterRecipe) -> tuple[PretrainedConfig, StateDrafterConfig]:
    """The target's config.json and the drafter's, once all is checked that is known without
    weights.

    Raises ConfigError for targets that are not decoder-only, layers that the target has not, and
    for objectives that train nothing.
    """
    target, asked = check_target(settings.target), settings.drafter
    if target.is_encoder_decoder:
        raise ConfigError(
            f"target.path = {settings.target.path!r} is an encoder-decoder model, but state "
            "drafters are trained for decoder-only ones; start from recipes/seq2seq.yaml"
        )
    depth = target.get_text_config(decoder=True).num_hidden_layers
    layers = asked.layers
    if layers is None:
        layers = tuple(range(max(0, depth - 2), depth))
    if not layers or max(layers) >= depth:
        raise ConfigError(
            f"drafter.layers = {list(layers)}: give layers of the target's, 0 to {depth - 1}"
        )
    states = asked.states
    if states is None:
        before = {depth // 4, 2 * depth // 3, max(0, layers[0] - 1)}
        states = (*sorted(before), -1)
    if not states or not all(-1 <= layer < depth for layer in states):
        raise ConfigError(
            f"drafter.states = {list(states)}: give layers of the target's, 0 to {depth - 1}, or "
            "-1 for its last hidden state"
        )
    check_losses(settings.objective)
    if asked.output_tokens is not None and asked.output_tokens > target.vocab_size:
        raise ConfigError(
            f"drafter.output_tokens = {asked.output_tokens} is more than the target's "
            f"{target.vocab_size} tokens; give fewer, or leave it out"
        )
    shape = {"k": asked.k, "previous_token_rank": asked.previous_token_rank}
    config = make_config(target, layers, states, **shape)
    config.target = settings.target.recorded()
    config.drafttrain_version = __version__
    return target, config
