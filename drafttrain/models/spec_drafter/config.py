"""The shape of a Spec-Drafter, as its config.json holds it."""

from __future__ import annotations

from typing import Literal

from transformers import PretrainedConfig


class SpecDrafterConfig(PretrainedConfig):
    """Shape of a Spec-Drafter. Everything about the target's family is a plain field."""

    model_type = "spec-drafter"
    is_encoder_decoder = True

    def __init__(
        self,
        vocab_size: int = 32,
        d_model: int = 512,
        encoder_layers: int = 12,
        decoder_layers: int = 2,
        attention_heads: int = 8,
        head_dim: int | None = None,
        ffn_dim: int = 2048,
        activation: str = "relu",
        gated_ffn: bool = False,
        norm: Literal["layer", "rms"] = "layer",
        norm_position: Literal["pre", "post"] = "post",
        norm_eps: float = 1e-5,
        bias: bool = True,
        positions: Literal["sinusoidal", "learned", "relative"] = "sinusoidal",
        max_positions: int = 512,
        position_offset: int = 0,
        relative_buckets: int = 32,
        relative_max_distance: int = 128,
        embedding_scale: float = 1.0,
        embedding_norm: bool = False,
        attention_scale: float | None = None,
        logit_scale: float = 1.0,
        untied_output: bool = False,
        logits_bias: bool = False,
        dropout: float = 0.1,
        k: int = 10,
        slots: Literal["anchored", "paper"] = "anchored",
        prefix_attention: Literal["causal", "bidirectional"] = "causal",
        soft_copy: bool = False,
        previous_token_rank: int = 0,
        mask_id: int | None = None,
        pad_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        decoder_start_token_id: int | None = None,
        target: dict | None = None,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.encoder_layers = encoder_layers
        self.decoder_layers = decoder_layers
        self.attention_heads = attention_heads
        self.head_dim = head_dim if head_dim is not None else d_model // attention_heads
        self.ffn_dim = ffn_dim
        self.activation = activation
        self.gated_ffn = gated_ffn
        self.norm = norm
        self.norm_position = norm_position
        self.norm_eps = norm_eps
        self.bias = bias
        self.positions = positions
        self.max_positions = max_positions
        self.position_offset = position_offset
        self.relative_buckets = relative_buckets
        self.relative_max_distance = relative_max_distance
        self.embedding_scale = embedding_scale
        self.embedding_norm = embedding_norm
        self.attention_scale = (
            attention_scale if attention_scale is not None else self.head_dim**-0.5
        )
        self.logit_scale = logit_scale
        self.untied_output = untied_output
        self.logits_bias = logits_bias
        self.dropout = dropout
        self.k = k
        self.slots = slots
        self.prefix_attention = prefix_attention
        self.soft_copy = soft_copy
        # before it had its name, the setting was called coupling_rank
        self.previous_token_rank = kwargs.pop("coupling_rank", previous_token_rank)
        # the tokenizer's mask, an unused id, or vocab_size: one more row, inside the drafter only
        self.mask_id = mask_id if mask_id is not None else vocab_size
        self.target = target
        kwargs.setdefault("tie_word_embeddings", False)  # shared rows are one parameter here
        kwargs["is_encoder_decoder"] = True
        super().__init__(**kwargs)
        # set last and as given: the base class must not range-check the mask row
        self.pad_token_id = pad_token_id
        self.eos_token_id = eos_token_id
        self.decoder_start_token_id = decoder_start_token_id

    @property
    def hidden_size(self) -> int:
        return self.d_model

    @property
    def embedding_rows(self) -> int:
        return max(self.vocab_size, self.mask_id + 1)

    @property
    def mask_rows(self) -> int:
        """Masked rows of a block of k: k for `paper`, k - 1 for `anchored`."""
        return self.k - 1 if self.slots == "anchored" else self.k
