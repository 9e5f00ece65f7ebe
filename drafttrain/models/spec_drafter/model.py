"""Spec-Drafter: a deep encoder and a shallow mask-predict decoder (SpecDec, Section 3.1).

The decoder reads the accepted prefix followed by k slots and predicts all k tokens in one pass.
Two slot conventions:

- `paper`: the decoder input is not shifted; slots are k masks and slot i predicts token i.
- `anchored` (ours): the input is shifted like the target's own (start token, y_1, ..., y_p); the
  position of the last committed token predicts y_{p+1} and k - 1 masks predict the rest, so the
  decoder can start from the target's own layers.

One network covers the Marian, BART, mBART, Pegasus, T5 and Whisper families: norm, positions,
activation and scaling are settings, and `initialise.py` reads them and the weights off a target.

With `slot_weights="own"` (ours) the decoder multiplies masks with other weights than tokens. Both
start from the target's; those of tokens can then stay as they are, so that the first anchored slot,
which a token predicts, is not unlearned for the sake of the others.

With `feeds_first` (ours) a draft takes two calls. The first drafts a token, and the second is fed
it in place of its first mask, so that what it says is known to the others in every layer, not only
when their tokens are chosen. With slots of own weights no weight is read more often than before.

With `state_width` (ours, after EAGLE, arXiv 2401.15077) each committed token comes with the hidden
state of the target's that it was predicted from, which knows more of what follows than a shallow
decoder can work out (`told.py`). The target's rows are there anyway; before its first call, and of
the tokens that decoding starts from, there are none.

With `encoder="target"` (ours) it has no encoder: its decoder attends to what the target's own
encoder makes of the source, which is there anyway, so that a round costs the shallow decoder alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from drafttrain.models.spec_drafter.config import SpecDrafterConfig, check_shape
from drafttrain.models.spec_drafter.layers import Extend, Norm, Stack, sinusoids
from drafttrain.models.spec_drafter.pooling import group_means, masked_group_means
from drafttrain.models.spec_drafter.rows import PADDING, Memory, Read, Rows
from drafttrain.models.spec_drafter.told import Told

UNDRAFTED = -1e4
"""Score of tokens that a drafter of few cannot draft: no probability in float32 and narrower types,
and finite, so that nothing that is reckoned from a row becomes NaN."""
SHUT = -1e4
"""Input at which silu is 0, and so is its slope."""


OutputRows = tuple[Tensor, Tensor | None]
"""Weight [N, D] and bias [N] of the output projection, of the tokens that can be drafted."""


class SpecDrafter(PreTrainedModel):
    """The drafter of SpecDec. `encode` once a source, `decode` once a round, `logits` on slots.

    A source is token ids, or, without an encoder of its own, the target's encoder output.
    """

    config_class = SpecDrafterConfig
    base_model_prefix = "drafter"
    main_input_name = "input_ids"
    _supports_sdpa = True

    def __init__(self, config: SpecDrafterConfig):
        super().__init__(config)
        check_shape(config)
        width, vocabulary = config.d_model, config.vocab_size
        linear = partial(nn.Linear, bias=False)
        self.embedding = nn.Embedding(config.embedding_rows, width)
        self.output = linear(width, vocabulary) if config.untied_output else None
        self.logits_bias = nn.Parameter(torch.zeros(vocabulary)) if config.logits_bias else None
        self.encoder = Stack(config, decoder=False) if config.encoder == "own" else None
        self.decoder = Stack(config, decoder=True)
        if config.cross_layers is not None:
            for layer in self.decoder.layers:
                layer.cross_attention.kv.requires_grad_(False)
        fed = config.state_width
        self.told = None if fed is None else Told(fed, width)
        if config.output_tokens is not None:
            self.register_buffer("draftable", torch.arange(config.output_tokens))
        if rank := config.previous_token_rank:
            self.previous_token_hidden = nn.Linear(width, rank)
            self.previous_token_embedding = linear(width, rank)
            self.previous_token_out = linear(rank, width)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        std = 0.02 if self.config.embedding_scale == 1.0 else self.config.d_model**-0.5
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, Norm):
            nn.init.ones_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Stack) and self.config.positions == "sinusoidal":
            module.sinusoids.copy_(sinusoids(self.config.max_positions, self.config.d_model))
        elif isinstance(module, SpecDrafter):
            if module.logits_bias is not None:
                nn.init.zeros_(module.logits_bias)
            if self.config.previous_token_rank:  # starts as no correction at all
                nn.init.zeros_(module.previous_token_out.weight)
            if module.told is not None:
                nn.init.zeros_(module.told.of_state.weight)
                nn.init.zeros_(module.told.of_token.weight)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * self.config.embedding_scale

    def encode(self, source: Tensor, attention_mask: Tensor | None = None) -> Memory:
        """Encoder, where it has one, and cross-attention projections, once a source.

        Shapes: source [B, S] token ids, or [B, S, E] what the target's encoder put out, in any
        type; attention_mask [B, S] (1 = there) or None.
        """
        there = None if attention_mask is None else attention_mask.bool()
        if self.encoder is None:
            x, there = self._pool(source.to(self.embedding.weight.dtype), there)
        mask = None if there is None else there[:, None, None, :]
        if self.encoder is not None:
            x = self.encode_source(source, mask)
        keys_values = [layer.cross_attention.project(x) for layer in self.decoder.layers]
        return Memory(keys_values, mask)

    def _pool(self, states: Tensor, there: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The target's encoder output as the decoder reads it. Shapes: [B, S, E], [B, S]."""
        size = self.config.source_pooling
        if there is None:
            return group_means(states, size), None
        return masked_group_means(states, there, size)

    def encode_source(self, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """The encoder's output. Shapes: input_ids [B, S], mask [B, 1, 1, S] -> [B, S, D]."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = self.encoder.start(self.embed(input_ids), positions)
        bias = self.encoder.bias(mask, positions, positions)
        for layer in self.encoder.layers:
            x, _ = layer(x, bias)
        return self.encoder.finish(x)

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        memory: Memory,
        extend: Sequence[Extend] | None = None,
        slots: Tensor | bool = False,
        states: Tensor | None = None,
        has_states: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Hidden states of the given rows, and their keys and values for a cache.

        Shapes: tokens, positions [B, T]; visible [B, 1, T, C] of all columns; extend: what puts
        them after cached columns, one a layer; slots: whether all rows are slots, or which [B, T];
        states, has_states: of `start`; key_positions [B, C], of relative positions, None: those
        given -> [B, T, D].
        """
        x = self.start(self.embed(tokens), positions, states, has_states)
        keys = positions if key_positions is None else key_positions
        bias = self.decoder.bias(visible, positions, keys)
        new = []
        for index, layer in enumerate(self.decoder.layers):
            own = None if extend is None else extend[index]
            x, keys_values = layer(x, bias, memory.keys_values[index], memory.mask, own, slots)
            new.append(keys_values)
        return self.decoder.finish(x), new

    def start(
        self,
        embedded: Tensor,
        positions: Tensor,
        states: Tensor | None,
        has_states: Tensor | None = None,
    ) -> Tensor:
        """What the decoder's first layer reads: rows with their positions, and the target's states.

        Shapes: embedded [B, T, D], positions [B, T], states [B, L, E] of the target's that the
        tokens in the first L rows were predicted from, zeros where there is none, has_states
        [B, L, 1] true of the rows that get one; None: all L -> [B, T, D].
        """
        x = self.decoder.start(embedded, positions)
        if self.told is None or states is None:
            return x
        told = self.told(states, embedded[:, : states.shape[1]])
        if has_states is not None:
            told = told.where(has_states, 0.0)
        return x + F.pad(told, (0, 0, 0, x.shape[1] - told.shape[1]))

    def logits(self, hidden: Tensor, previous: Tensor | None = None) -> Tensor:
        """Scores of every token at the given rows; `previous` is the token before each prediction.

        With a previous-token rank, hidden is corrected first:
        + W_o silu(W_h hidden + previous_token_features(previous)).
        Shapes: hidden [..., D], previous [...] -> [..., V].
        """
        return self.spread(self.draftable_logits(hidden, previous))

    def draftable_logits(self, hidden: Tensor, previous: Tensor | None = None) -> Tensor:
        """`logits` of the tokens that it can draft alone, in the order of `draftable`.

        Shapes: hidden [..., D], previous [...] -> [..., N].
        """
        if self.config.previous_token_rank:
            if previous is None:
                raise ValueError("previous-token features need the token before each prediction")
            hidden = self.with_previous_token(hidden, self.previous_token_hidden(hidden), previous)
        return self._project(hidden)

    def spread(self, logits: Tensor) -> Tensor:
        """Scores among those of all tokens. Shapes: [..., N] -> [..., V]."""
        if self.config.output_tokens is None:
            return logits
        every = logits.new_full((*logits.shape[:-1], self.config.vocab_size), UNDRAFTED)
        return every.index_copy(-1, self.draftable, logits)

    def draftable_labels(self, labels: Tensor, ignored: int) -> Tensor:
        """Where tokens stand in `draftable`; `ignored` of those that cannot be drafted. [...]"""
        if self.config.output_tokens is None:
            return labels
        places = torch.full((self.config.vocab_size,), ignored, device=labels.device)
        places[self.draftable] = torch.arange(len(self.draftable), device=labels.device)
        known = labels != ignored
        return torch.where(known, places[labels.where(known, 0)], ignored)

    def with_previous_token(self, hidden: Tensor, from_hidden: Tensor, previous: Tensor) -> Tensor:
        """A slot's hidden state, corrected by the token before it."""
        return hidden + self.previous_token_out(
            F.silu(from_hidden + self.previous_token_features(previous))
        )

    def previous_token_features(self, previous: Tensor) -> Tensor:
        """What a token tells the slot after it: W_p E[previous], each row of E of one length.

        From the embedding, so that tokens tell alike what is alike from the first step on, and
        normed, as families scale theirs differently. Those of `no_token` shut the correction off.
        Shapes: [...] -> [..., rank].
        """
        there = (previous != self.config.no_token)[..., None]
        embedded = self.embedding(previous.clamp(max=self.config.no_token - 1))
        told = self.previous_token_embedding(F.rms_norm(embedded, embedded.shape[-1:]))
        return torch.where(there, told, SHUT)

    def project(self, hidden: Tensor, rows: OutputRows | None = None) -> Tensor:
        """Output projection, after any correction. rows: `output_rows`, where they are known.
        Shapes: [..., D] -> [..., V]."""
        return self.spread(self._project(hidden, rows))

    def _project(self, hidden: Tensor, rows: OutputRows | None = None) -> Tensor:
        """Shapes: [..., D] -> [..., N]."""
        if self.config.logit_scale != 1.0:
            hidden = hidden * self.config.logit_scale
        return F.linear(hidden, *(self.output_rows() if rows is None else rows))

    def output_rows(self) -> OutputRows:
        """Weight and bias of the output projection, of the tokens that can be drafted.

        Shapes: -> [N, D], [N] or None.
        """
        weight, bias = self.output_weight(), self.logits_bias
        if self.config.output_tokens is None:
            return weight, bias
        return weight[self.draftable], None if bias is None else bias[self.draftable]

    def output_weight(self) -> Tensor:
        """Rows of the output projection, of all tokens. Shapes: -> [V, D]."""
        if self.output is not None:
            return self.output.weight
        return self.embedding.weight[: self.config.vocab_size]

    def previous_token_rows(self) -> Tensor:
        """What one unit of the correction adds to each token's score. Shapes: -> [V, rank]."""
        return self.output_weight() @ self.previous_token_out.weight * self.config.logit_scale

    def forward(
        self,
        source: Tensor,
        attention_mask: Tensor | None,
        rows: Rows,
        memory: Memory | None = None,
        prefix_rows: int | None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of all rows (training). Shapes: states of `start` -> [B, T, D].

        prefix_rows: how many of each line, the first, are the prefix's; needed where slots have
        weights of their own.
        """
        if memory is None:
            memory = self.encode(source, attention_mask)
        if self.config.slot_weights == "shared" or prefix_rows == rows.tokens.shape[1]:
            return self.read(rows, memory, states=states).hidden
        prefix = self.read(rows.part(0, prefix_rows), memory, states=states)
        slots = self.read(rows.part(prefix_rows), memory, prefix)
        return torch.cat((prefix.hidden, slots.hidden), dim=1)

    def read(
        self,
        rows: Rows,
        memory: Memory,
        prefix: Read | None = None,
        states: Tensor | None = None,
    ) -> Read:
        """Hidden states, keys and values of rows, which also see the prefix read before.

        states: of `start`, where these rows are the prefix's, or begin with them.

        A causal prefix sees no block, so it can be read once for several passes over its blocks;
        where slots have weights of their own it must be.
        """
        before = None if prefix is None else prefix.rows
        visible = rows.visible(
            self.config.prefix_attention == "bidirectional",
            before,
            self.config.slot_attention == "causal",
        )
        visible = visible | (rows.block == PADDING)[:, None, :, None]  # no row without a key
        extend = keys = None
        if prefix is not None:
            extend = [partial(_after, *both) for both in prefix.keys_values]
            keys = torch.cat((prefix.rows.positions, rows.positions), dim=1)
        fed = rows.tokens, rows.positions, visible, memory, extend, prefix is not None, states
        return Read(rows, *self.decode(*fed, key_positions=keys))


def _after(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor
) -> tuple[Tensor, Tensor]:
    """Cached keys and values, and the new ones after them. Shapes: all [B, H, T, C]."""
    return torch.cat((keys, new_keys), dim=2), torch.cat((values, new_values), dim=2)


AutoConfig.register("spec-drafter", SpecDrafterConfig)
AutoModel.register(SpecDrafterConfig, SpecDrafter)
