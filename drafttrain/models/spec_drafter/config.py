"""The shape of a Spec-Drafter, as its config.json holds it."""

from __future__ import annotations

from typing import Any, Literal

from transformers import PretrainedConfig


class SpecDrafterConfig(PretrainedConfig):
    """Shape of a Spec-Drafter. Everything about the target's family is a plain field."""

    model_type = "spec-drafter"

    vocab_size: int = 32
    d_model: int = 512
    encoder: Literal["own", "target"] = "own"
    """target: it has none and reads what the target's encoder puts out."""
    encoder_layers: int = 12
    decoder_layers: int = 2
    source_width: int | None = None
    """Width of the encoder's output. None: d_model."""
    source_pooling: int = 1
    """States of the target's encoder that it reads as one, their mean."""
    cross_layers: list[int] | None = None
    """Layers of the target whose keys and values of cross-attention its own layers have, as they
    stand: with their target it need not make them again. None: it has others."""
    attention_heads: int = 8
    head_dim: int | None = None
    ffn_dim: int = 2048
    activation: str = "relu"
    gated_ffn: bool = False
    norm: Literal["layer", "rms"] = "layer"
    norm_position: Literal["pre", "post"] = "post"
    norm_eps: float = 1e-5
    bias: bool = True
    positions: Literal["sinusoidal", "learned", "relative"] = "sinusoidal"
    max_positions: int = 512
    position_offset: int = 0
    relative_buckets: int = 32
    relative_max_distance: int = 128
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    attention_scale: float | None = None
    logit_scale: float = 1.0
    untied_output: bool = False
    logits_bias: bool = False
    output_tokens: int | None = None
    """How many tokens it can draft: those that `draftable` names. None: all."""
    dropout: float = 0.1
    k: int = 10
    slots: Literal["anchored", "paper"] = "anchored"
    prefix_attention: Literal["causal", "bidirectional"] = "causal"
    slot_attention: Literal["bidirectional", "causal"] = "bidirectional"
    """causal: slots see those before them in their block alone."""
    feeds_first: bool = False
    """A draft takes two calls: one drafts the first token, which stands in the first of the slots
    of the other."""
    state_width: int | None = None
    """Width of the target's last hidden states: each committed token is told the one that it was
    predicted from (`told.py`). None: it is told none."""
    told_layer: int | None = None
    """Layer of the target that its first layer is a copy of, and whose input the map of states is
    fitted to. None: the first one, whose input is the tokens, or none."""
    slot_weights: Literal["shared", "own"] = "shared"
    """own: the decoder's products have other weights for masked slots than for tokens."""
    previous_token_rank: int = 0
    slot_temperatures: list[float] | None = None
    """Temperature of each slot's rows under which a greedy target's tokens are likeliest: what
    trees are scored by where the target is greedy. None: it was not fitted."""
    mask_id: int | None = None
    """The tokenizer's mask, an unused id, or vocab_size: one more row, inside the drafter only."""
    pad_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | None = None
    target: dict | None = None
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = False
    """Shared rows are one parameter here."""

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.d_model // self.attention_heads
        if self.source_width is None:
            self.source_width = self.d_model
        if self.attention_scale is None:
            self.attention_scale = self.head_dim**-0.5
        if self.mask_id is None:
            self.mask_id = self.vocab_size
        # before it had its name, the setting was called coupling_rank
        self.previous_token_rank = kwargs.pop("coupling_rank", self.previous_token_rank)
        super().__post_init__(**kwargs)

    @property
    def hidden_size(self) -> int:
        return self.d_model

    @property
    def embedding_rows(self) -> int:
        return max(self.vocab_size, self.mask_id + 1)

    @property
    def no_token(self) -> int:
        """What a row is told as the token before it that is not to be corrected by one."""
        return self.embedding_rows

    @property
    def mask_rows(self) -> int:
        """Masked rows of a block of k: k for `paper`, k - 1 for `anchored`."""
        return self.k - 1 if self.slots == "anchored" else self.k


def check_shape(config: SpecDrafterConfig) -> None:
    """Raises ValueError for settings that do not go together."""
    if config.prefix_attention == "bidirectional" and config.slots == "anchored":
        raise ValueError(
            "anchored slots need a causal prefix (a prefix that sees the slots would see its "
            "own labels); set drafter.slots=paper or drafter.prefix_attention=causal"
        )
    if config.slot_weights == "own" and (
        config.prefix_attention == "bidirectional" or config.slots == "paper"
    ):
        raise ValueError(
            "slots with weights of their own are anchored behind a causal prefix; set "
            "drafter.slots=anchored and drafter.prefix_attention=causal, or "
            "drafter.slot_weights=shared"
        )
    if config.slot_attention == "causal" and config.prefix_attention == "bidirectional":
        raise ValueError(
            "slots that see a prefix which sees them all are not causal; set "
            "drafter.prefix_attention=causal or drafter.slot_attention=bidirectional"
        )
    if config.feeds_first and (config.slots == "paper" or config.slot_attention == "bidirectional"):
        raise ValueError(
            "a first token that is fed stands in front of causal slots, behind an anchor; set "
            "drafter.slots=anchored and drafter.slot_attention=causal, or "
            "drafter.feeds_first=false"
        )
    if config.state_width is not None and config.slots == "paper":
        raise ValueError(
            "the target's states are fed with tokens behind a causal prefix; set "
            "drafter.slots=anchored, or drafter.target_states=false"
        )
