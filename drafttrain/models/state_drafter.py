"""A drafter behind the target's own states: Spec-Drafter's split for a decoder-only target.

The deep part is the target, the shallow part a few copies of its layers. What the target has read,
prompt and verified tokens alike, is read once: in the copied layers the drafter's cache holds the
target's own keys and values, and what is fed is worked out from the target's hidden states at the
row that the last committed token came from (as EAGLE, arXiv 2401.15077, and EAGLE-3 do) and from
that token. One call of k slots drafts k tokens. Embeddings and output projection are the target's.

It starts from the target alone (`fit_start`): what is fed is a linear map of those states and that
token, and least squares give the one that comes nearest to what the target feeds its own layer.
"""

from __future__ import annotations

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
"""Which of the two maps a slot is fed by: the first slot of a block, all others."""


class StateDrafterConfig(PretrainedConfig):
    """Shape of a state drafter, and what it reads of its target."""

    model_type = "state-drafter"

    k: int = 4
    previous_token_rank: int = 0
    """Rank of the previous-token features of the slots of a block; 0: none
    are."""
    shallow: dict[str, Any] | None = None
    """config.json of its layers: the target's, with fewer of them and no vocabulary."""
    context_layers: list[int] | None = None
    """The target's layer that each of its own was copied from, and whose cache it reads."""
    state_layers: list[int] | None = None
    """Layers of the target whose outputs it is fed, -1 the last hidden state
    (`TargetRequirements`)."""
    hidden_size: int = 8
    vocab_size: int = 32
    draftable_tokens: list[int] | None = None
    target: dict[str, Any] | None = None
    drafttrain_version: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k = {self.k!r}: a block has one token at least")
        super().__post_init__(**kwargs)


class StateDrafter(PreTrainedModel):
    """Copied layers, and the two maps of states and token to what the slots are fed."""

    config_class = StateDrafterConfig
    base_model_prefix = "drafter"
    main_input_name = "fed"

    def __init__(self, config: StateDrafterConfig):
        super().__init__(config)
        values = dict(config.shallow or {})
        body = AutoConfig.for_model(values.pop("model_type"), **values)
        self.decoder = AutoModel.from_config(body, dtype=torch.get_default_dtype())
        self.decoder.get_input_embeddings().requires_grad_(False)  # of no token, never used
        self._no_split_modules = self.decoder._no_split_modules
        width = config.hidden_size
        read = width * len(config.state_layers or ())
        self.of_states = nn.ModuleList([nn.Linear(read, width, bias=False) for _ in range(2)])
        self.of_token = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.slots = nn.Parameter(torch.zeros(config.k, width))
        self.previous_token = None
        if rank := config.previous_token_rank:
            self.previous_token = PreviousToken(width, rank)
        self.post_init()
        if self.previous_token is not None:
            nn.init.zeros_(self.previous_token.out.weight)

    def of_anchors(self, states: Tensor) -> Tensor:
        """What the target's states say to the slots of blocks, of which one stands behind each of A
        tokens: to the first slot, and to all others.

        states: of `state_layers`, at the row that the token came from. Shapes: [A, S, D] ->
        [A, 2, D].
        """
        found = normalised(states.to(self.dtype)).flatten(1)
        return torch.stack([part(found) for part in self.of_states], 1)

    def fed(self, of_anchors: Tensor, embedded: Tensor, depths: Tensor) -> Tensor:
        """What slots are fed. of_anchors: as above, of the token that the block of each stands
        behind; embedded: that token; depths: the slot's number in its block. Shapes: [N, 2, D],
        [N, D], [N] -> [N, D].
        """
        found = normalised(embedded.to(self.dtype))
        tokens = torch.stack([part(found) for part in self.of_token], 1)
        which = depths.clamp(max=LATER)
        each = torch.arange(len(depths), device=depths.device)
        return (of_anchors + tokens)[each, which] + self.slots[depths]

    def forward(
        self,
        fed: Tensor,
        positions: Tensor,
        mask: Tensor,
        keys_values: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Hidden states of slots, to be projected by the target's output.

        mask: added to attention scores, over the target's columns and then the slots. Shapes: fed
        [B, N, D], positions [B, N], mask [B, 1, N, T + N], keys and values of each layer
        [B, heads, T, head_dim] -> [B, N, D].
        """
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(keys_values):
            cache.update(keys.to(self.dtype), values.to(self.dtype), layer)
        return self.decoder(
            inputs_embeds=fed,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=False,
        )[0]


def normalised(states: Tensor) -> Tensor:
    """States of the same size, whatever layer they are of. Shapes: [..., D]."""
    return F.rms_norm(states, states.shape[-1:])


class Reading(NamedTuple):
    """What a state drafter reads of a batch of texts that its target has read."""

    keys_values: list[tuple[Tensor, Tensor]]
    """Of each context layer, [B, heads, T, head_dim]."""
    states: Tensor
    """[B, T, S, D] of the state layers."""
    hidden: Tensor
    """[B, T, D] the last hidden states."""
    wanted: Tensor
    """[B, T, D] what the target feeds the first context layer."""


@torch.no_grad()
def read_target(
    target: PreTrainedModel, config: StateDrafterConfig, input_ids: Tensor, **given: Tensor | None
) -> Reading:
    """Let the target read texts; given: attention_mask, position_ids. Shapes: input_ids [B, T]."""
    cache = DynamicCache()
    output = target.get_decoder()(
        input_ids=input_ids,
        past_key_values=cache,
        use_cache=True,
        output_hidden_states=True,
        **given,
    )
    outputs, last = output.hidden_states, output[0]  # outputs[l + 1] is layer l's
    states = [last if layer == -1 else outputs[layer + 1] for layer in config.state_layers]
    found = [cache.layers[layer] for layer in config.context_layers]
    return Reading(
        [(layer.keys, layer.values) for layer in found],
        torch.stack(states, 2),
        last,
        outputs[config.context_layers[0]],
    )


def check_own_layers(config: PretrainedConfig, name: str) -> None:
    """Whether a state drafter's config.json says what it reads; `name` is what messages call the
    drafter. Raises ConfigError."""
    shallow, layers, states = config.shallow, config.context_layers, config.state_layers
    whole = isinstance(shallow, dict) and isinstance(layers, list) and isinstance(states, list)
    if not whole or not states or len(layers) != shallow.get("num_hidden_layers"):
        raise ConfigError(
            f"{name} is a state drafter, but its config.json does not say what it reads: "
            f"context_layers = {layers!r} for the layers of `shallow`, state_layers = {states!r}; "
            "copy it again"
        )


def check_state_recipe(settings: StateDrafterRecipe) -> tuple[PretrainedConfig, StateDrafterConfig]:
    """The target's config.json and the drafter's, once all is checked that is known without
    weights.

    Raises ConfigError as `check_follower`, and for layers that the target has not.
    """
    target, chosen = check_follower(settings), settings.drafter
    depth = target.get_text_config(decoder=True).num_hidden_layers
    layers, states = chosen.layers, chosen.states
    if layers is None:
        layers = tuple(range(max(0, depth - 2), depth))
    if not layers or max(layers) >= depth:
        raise ConfigError(
            f"drafter.layers = {list(layers)}: give layers of the target's, 0 to {depth - 1}"
        )
    if states is None:
        before = {depth // 4, 2 * depth // 3, max(0, layers[0] - 1)}
        states = (*sorted(before), -1)
    if not states or not all(-1 <= layer < depth for layer in states):
        raise ConfigError(
            f"drafter.states = {list(states)}: give layers of the target's, 0 to {depth - 1}, or "
            "-1 for its last hidden state"
        )
    shape = {"k": chosen.k, "previous_token_rank": chosen.previous_token_rank}
    config = make_config(target, layers, states, **shape)
    config.target = settings.target.recorded()
    config.drafttrain_version = __version__
    return target, config


def make_config(
    target: PretrainedConfig, layers: Sequence[int], states: Sequence[int], **shape: object
) -> StateDrafterConfig:
    """The shape of a drafter of these layers of a target, which reads the outputs of others.

    shape: k, previous_token_rank.
    """
    decoder = shallow_config(target, layers)
    decoder.vocab_size = 1  # its embeddings are the target's
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
    """Give a drafter the target's weights of its layers and of the final norm."""
    body = target.get_decoder()
    weights = take_layers(body.state_dict(), layer_stem(body), drafter.config.context_layers)
    embedding = "embed_tokens.weight"  # of no token
    weights[embedding] = drafter.decoder.state_dict()[embedding]
    drafter.decoder.load_state_dict(weights)


@torch.no_grad()
def fit_start(
    drafter: StateDrafter, target: PreTrainedModel, texts: Iterable[tuple[list[int], list[int]]]
) -> int:
    """Set the maps by least squares along texts, prompt and output each; tokens that it took.

    The first slot's map is fitted to what the target feeds the first copied layer at the token that
    the block stands behind, the later ones' to what it feeds it one token on.
    """
    config, embed = drafter.config, target.get_input_embeddings()
    width = config.hidden_size * (len(config.state_layers) + 1)
    sums = [LeastSquares.empty(width, config.hidden_size) for _ in (FIRST, LATER)]
    for prompt, output in texts:
        ids = torch.tensor([[*prompt, *output[:-1]]], device=target.device)
        reading = read_target(target, config, ids)
        anchors = torch.arange(len(prompt), ids.shape[1], device=target.device)
        states = normalised(reading.states[0, anchors - 1].float()).flatten(1)
        tokens = normalised(embed(ids[0, anchors]).float())
        wanted = reading.wanted[0, anchors]
        sums[FIRST].add(torch.cat([states, tokens], 1).cpu(), wanted.cpu())
        sums[LATER].add(torch.cat([states[:-1], tokens[:-1]], 1).cpu(), wanted[1:].cpu())
    for which, own in enumerate(sums):
        weights, constant = own.solve(RIDGE)
        of_states, of_token = weights.split([width - config.hidden_size, config.hidden_size], 1)
        drafter.of_states[which].weight.copy_(of_states)
        drafter.of_token[which].weight.copy_(of_token)
        drafter.of_token[which].bias.copy_(constant)
    return sums[FIRST].count


AutoConfig.register(StateDrafterConfig.model_type, StateDrafterConfig)
AutoModel.register(StateDrafterConfig, StateDrafter)
