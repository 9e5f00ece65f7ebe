"""A drafter on the target's hidden states and KV cache: Spec-Drafter's idea for decoder-only
targets.

It consists of copies of a few target layers. Their KV cache holds the target's own keys and values
for the prompt and all verified tokens, so the drafter never processes these. The inputs of its k
slots are a linear map of the last committed token and of the target's hidden states that it was
predicted from (as in EAGLE, arXiv 2401.15077, and EAGLE-3), initialised by `fit_start`. One forward
pass of k slots drafts k tokens. Embeddings and output projection are the target's.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, DynamicCache, PretrainedConfig, PreTrainedModel

from drafttrain import __version__
from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import StateDrafterRecipe
from drafttrain.models.causal_drafter import check_follower
from drafttrain.models.language_models import (
    SPECIAL_TOKENS,
    layer_stem,
    shallow_config,
    take_layers,
)
from drafttrain.models.least_squares import RIDGE, LeastSquares
from drafttrain.models.previous_token import PreviousToken

FIRST, LATER = 0, 1
"""Index of the input map of a slot: of the first slot of a block, of all later slots."""


class StateDrafterConfig(PretrainedConfig):
    """Shape of a state drafter, and the target states it reads."""

    model_type = "state-drafter"

    k: int = 4
    previous_token_rank: int = 0
    """Rank of the previous-token features; 0: none."""
    shallow: dict[str, Any] | None = None
    """config.json of its layers: the target's, with fewer layers and no vocabulary."""
    context_layers: list[int] | None = None
    """Target layer that each of its layers was copied from, and whose KV cache it reads."""
    state_layers: list[int] | None = None
    """Target layers whose outputs it reads; -1 is the last hidden state
    (`TargetRequirements`)."""
    hidden_size: int = 8
    vocab_size: int = 32
    draftable_tokens: list[int] | None = None
    target: dict[str, Any] | None = None
    drafttrain_version: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k = {self.k!r} must be an integer of 1 or more")
        super().__post_init__(**kwargs)


class StateDrafter(PreTrainedModel):
    """Copied layers, and two maps from states and token to slot inputs."""

    config_class = StateDrafterConfig
    base_model_prefix = "drafter"
    main_input_name = "inputs"

    def __init__(self, config: StateDrafterConfig):
        super().__init__(config)
        values = dict(config.shallow or {})
        body = AutoConfig.for_model(values.pop("model_type"), **values)
        self.decoder = AutoModel.from_config(body, dtype=torch.get_default_dtype())
        self.decoder.get_input_embeddings().requires_grad_(False)  # unused placeholder
        self._no_split_modules = self.decoder._no_split_modules
        width = config.hidden_size
        read = width * len(config.state_layers or ())
        self.of_states = nn.ModuleList([nn.Linear(read, width, bias=False) for _ in range(2)])
        self.of_token = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.slots = nn.Parameter(torch.zeros(config.k, width))
        rank = config.previous_token_rank
        self.previous_token = PreviousToken(width, rank) if rank else None
        self.post_init()
        if self.previous_token is not None:
            nn.init.zeros_(self.previous_token.out.weight)

    def anchor_inputs(self, states: Tensor) -> Tensor:
        """Computes the part of slot inputs that comes from the target's states, for the first slot
        and for all later slots of the blocks after A anchor tokens.

        states: outputs of `state_layers` that each anchor token was predicted from.
        Shapes: [A, S, D] -> [A, 2, D].
        """
        inputs = normalised(states.to(self.dtype)).flatten(1)
        return torch.stack([part(inputs) for part in self.of_states], 1)

    def slot_inputs(self, anchor_inputs: Tensor, embedded: Tensor, depths: Tensor) -> Tensor:
        """Computes the inputs of N slots from `anchor_inputs` and embeddings of their anchor tokens
        and from their indices in their blocks. Shapes: [N, 2, D], [N, D], [N] -> [N, D]."""
        inputs = normalised(embedded.to(self.dtype))
        tokens = torch.stack([part(inputs) for part in self.of_token], 1)
        maps = depths.clamp(max=LATER)
        rows = torch.arange(len(depths), device=depths.device)
        return (anchor_inputs + tokens)[rows, maps] + self.slots[depths]  # one map per slot

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        mask: Tensor,
        keys_values: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Computes the hidden states of slots, for the target's output projection.

        inputs: of the slots. mask: added to attention scores, over T cached columns of the target
        and then the slots. Shapes: inputs [B, N, D], positions [B, N], mask [B, 1, N, T + N], keys
        and values of each layer [B, heads, T, head_dim] -> [B, N, D].
        """
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(keys_values):
            cache.update(keys.to(self.dtype), values.to(self.dtype), layer)
        return self.decoder(
            inputs_embeds=inputs,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=False,
        )[0]


def normalised(states: Tensor) -> Tensor:
    """Scales states of all layers to the same norm. Shapes: [..., D] -> [..., D]."""
    return F.rms_norm(states, states.shape[-1:])


class Reading(NamedTuple):
    """The target states that a state drafter reads, for a batch of texts."""

    keys_values: list[tuple[Tensor, Tensor]]
    """[B, heads, T, head_dim] of each context layer."""
    states: Tensor
    """[B, T, S, D] outputs of the state layers."""
    hidden: Tensor
    """[B, T, D] last hidden states."""
    layer_inputs: Tensor
    """[B, T, D] inputs of the first context layer."""


@torch.no_grad()
def read_target(
    target: PreTrainedModel, config: StateDrafterConfig, input_ids: Tensor, **given: Tensor | None
) -> Reading:
    """Runs the target on texts; given: attention_mask, position_ids. Shapes: input_ids [B, T]."""
    cache = DynamicCache()
    given |= {"past_key_values": cache, "use_cache": True, "output_hidden_states": True}
    output = target.get_decoder()(input_ids=input_ids, **given)
    outputs, last = output.hidden_states, output[0]  # outputs[l + 1] is the output of layer l
    states = [last if layer == -1 else outputs[layer + 1] for layer in config.state_layers]
    context = [cache.layers[layer] for layer in config.context_layers]
    return Reading(
        [(layer.keys, layer.values) for layer in context],
        torch.stack(states, 2),
        last,
        outputs[config.context_layers[0]],
    )


def check_own_layers(config: PretrainedConfig, name: str) -> None:
    """Raises ConfigError if a state drafter's config.json does not list the layers it reads.
    `name`: the drafter's name in messages."""
    shallow, layers, states = config.shallow, config.context_layers, config.state_layers
    complete = isinstance(shallow, dict) and isinstance(layers, list) and isinstance(states, list)
    if not complete or not states or len(layers) != shallow.get("num_hidden_layers"):
        raise ConfigError(
            f"{name} is a state drafter, but its config.json does not say what it reads: "
            f"context_layers = {layers!r} for the layers of `shallow`, state_layers = {states!r}; "
            "copy it again"
        )


def check_state_recipe(settings: StateDrafterRecipe) -> tuple[PretrainedConfig, StateDrafterConfig]:
    """Checks the settings without reading weights; returns the target's and the drafter's config.
    Raises ConfigError."""
    target, chosen = check_follower(settings), settings.drafter
    depth = target.get_text_config(decoder=True).num_hidden_layers
    layers, states = chosen.layers, chosen.states
    if layers is None:
        layers = range(max(0, depth - 2), depth)
    if not layers or max(layers) >= depth:
        raise ConfigError(
            f"drafter.layers = {list(layers)}: give layers of the target, 0 to {depth - 1}"
        )
    if states is None:
        states = (*sorted({depth // 4, 2 * depth // 3, max(0, layers[0] - 1)}), -1)
    if not states or not all(-1 <= layer < depth for layer in states):
        raise ConfigError(
            f"drafter.states = {list(states)}: give layers of the target, 0 to {depth - 1}, or -1 "
            "for its last hidden state"
        )
    shape = {"k": chosen.k, "previous_token_rank": chosen.previous_token_rank}
    config = make_config(target, layers, states, **shape)
    config.target, config.drafttrain_version = settings.target.recorded(), __version__
    return target, config


def make_config(
    target: PretrainedConfig, layers: Sequence[int], states: Sequence[int], **shape: object
) -> StateDrafterConfig:
    """Makes the config of a drafter with copies of `layers` that reads the outputs of `states`.
    shape: k, previous_token_rank."""
    decoder = shallow_config(target, layers)
    decoder.vocab_size = 1  # placeholder: embeddings are the target's
    for name in SPECIAL_TOKENS:
        setattr(decoder, name, None)
    return StateDrafterConfig(
        **shape,
        shallow={key: value for key, value in decoder.to_dict().items() if key != "dtype"},
        context_layers=list(layers),
        state_layers=list(states),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
        is_encoder_decoder=False,
    )


@torch.no_grad()
def copy_layers(drafter: StateDrafter, target: PreTrainedModel) -> None:
    """Copies the target's weights of the context layers and of the final norm to the drafter."""
    body = target.get_decoder()
    weights = take_layers(body.state_dict(), layer_stem(body), drafter.config.context_layers)
    embedding = "embed_tokens.weight"  # unused placeholder
    weights[embedding] = drafter.decoder.state_dict()[embedding]
    drafter.decoder.load_state_dict(weights)


@torch.no_grad()
def fit_start(
    drafter: StateDrafter, target: PreTrainedModel, texts: Iterable[tuple[list[int], list[int]]]
) -> int:
    """Fits the input maps by least squares on texts of (prompt, output): that of the first slot to
    the inputs of the target's first copied layer at the anchor token, that of later slots to its
    inputs one token later. Returns the number of tokens used."""
    config, embed = drafter.config, target.get_input_embeddings()
    width = config.hidden_size
    read = width * len(config.state_layers)
    sums = [LeastSquares(read + width, width) for _ in (FIRST, LATER)]
    for prompt, output in texts:
        ids = torch.tensor([[*prompt, *output[:-1]]], device=target.device)
        reading = read_target(target, config, ids)
        anchors = torch.arange(len(prompt), ids.shape[1], device=target.device)
        states = normalised(reading.states[0, anchors - 1].float()).flatten(1)
        tokens = normalised(embed(ids[0, anchors]).float())
        outputs = reading.layer_inputs[0, anchors]
        sums[FIRST].add(torch.cat([states, tokens], 1).cpu(), outputs.cpu())
        sums[LATER].add(torch.cat([states[:-1], tokens[:-1]], 1).cpu(), outputs[1:].cpu())
    for index, fit in enumerate(sums):
        weights, constant = fit.solve(RIDGE)
        drafter.of_states[index].weight.copy_(weights[:, :read])
        drafter.of_token[index].weight.copy_(weights[:, read:])
        drafter.of_token[index].bias.copy_(constant)
    return sums[FIRST].count


AutoConfig.register(StateDrafterConfig.model_type, StateDrafterConfig)
AutoModel.register(StateDrafterConfig, StateDrafter)
