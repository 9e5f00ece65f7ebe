"""Drafters whose prompt is read by the target itself: the deep part is the target.

Their config.json has `prompt_layers`, a layer of the target for each of their own. At the prompt's
positions their cache holds the target's keys and values of these layers; they read the answer
themselves, behind it. What they read of the target is in its cache anyway, and costs nothing.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from drafttrain.config.base import ConfigError


def prompt_layers(config: PretrainedConfig) -> tuple[int, ...]:
    """The target's layers whose keys and values of the prompt a drafter's layers have; empty: it
    reads prompts itself."""
    return tuple(getattr(config, "prompt_layers", None) or ())


def check_prompt_layers(
    drafter: PretrainedConfig, target: PretrainedConfig, drafter_name: str, target_name: str
) -> None:
    """Whether a drafter can go on behind what this target makes of a prompt, by both config.json.

    A layer of the target's for each of its own; heads, their width and how positions turn them must
    be the same. Raises ConfigError; says nothing of drafters that read prompts themselves.
    """
    layers = prompt_layers(drafter)
    if not layers:
        return
    own, theirs = drafter.get_text_config(decoder=True), target.get_text_config(decoder=True)
    depth, remedy = theirs.num_hidden_layers, "give the target that it was trained for"
    if len(layers) != own.num_hidden_layers or not all(0 <= layer < depth for layer in layers):
        raise ConfigError(
            f"{drafter_name} has prompt_layers = {list(layers)} in its config.json for "
            f"{own.num_hidden_layers} layers of its own, but {target_name} has layers 0 to "
            f"{depth - 1}; {remedy}"
        )
    for name, value in _kept(own).items():
        other = _kept(theirs)[name]
        if value != other:
            raise ConfigError(
                f"{drafter_name} goes on behind the prompt's keys and values of a model with "
                f"{name} = {value}, but {target_name} has {other}; {remedy}"
            )


def _kept(config: PretrainedConfig) -> dict[str, object]:
    """What keys and values in a cache depend on, beside weights."""
    values, heads = config.to_dict(), config.num_attention_heads
    width = values.get("head_dim") or config.hidden_size // heads
    return {
        "model_type": config.model_type,
        "num_key_value_heads": values.get("num_key_value_heads") or heads,
        "head_dim": width,
        "rope_parameters": values.get("rope_parameters"),
    }
