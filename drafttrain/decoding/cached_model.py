"""Encoder-decoder targets with a KV cache: the only code that touches caches and positions.

A state belongs to one sequence: its encoder output, the cross-attention keys and values
(computed once) and the self-attention keys and values of the tokens fed so far. `score` feeds the
committed tokens that are not cached yet, then the draft; `keep` gathers what the verifier
accepted. `Cache.crop` is never used: its meaning changed between releases of Transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    MarianMTModel,
    MBartForConditionalGeneration,
    MT5ForConditionalGeneration,
    PegasusForConditionalGeneration,
    PreTrainedModel,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutput

from drafttrain.decoding.logits_processing import TargetProcessors
from drafttrain.decoding.types import Proposal, Sampling, Source

BART_LIKE = (
    BartForConditionalGeneration,
    MarianMTModel,
    MBartForConditionalGeneration,
    PegasusForConditionalGeneration,
)
T5_LIKE = (T5ForConditionalGeneration, MT5ForConditionalGeneration)


@dataclass(frozen=True)
class Score:
    """What the target says about one proposal."""

    logits: Tensor
    """[N + 1, V] row 0 follows the last committed token, row i + 1 follows draft token i; float32
    at least."""
    hidden: Tensor
    """[N + 1, D] last hidden state of each row."""


class SequenceState:
    """What the target has computed for one sequence."""

    def __init__(self, encoder_outputs: BaseModelOutput) -> None:
        self.encoder_outputs = encoder_outputs  # its first entry: [1, S, D]
        # without a configuration: with one, sliding-window layers would drop states
        self.cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self.cached = 0  # tokens of the decoder that are cached, all of them committed
        self.fed = 0  # committed tokens that the last call fed in front of its draft


class CachedModel:
    """An encoder-decoder language model of Transformers, decoding with a KV cache.

    BART, mBART, Pegasus, Marian and T5 are known to have a plain cache. Others are tried on a few
    tokens first, and refused if drafting and dropping tokens changes what they say.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        check_architecture(model)
        self.model = model
        self.device = model.device
        self._decoder = model.get_decoder()
        self._encoder = model.get_encoder()
        settings = model.config.to_dict()
        self.max_positions: int | None = settings.get("max_position_embeddings")
        """Most tokens that the encoder or the decoder can be fed; None = no limit."""
        self.eos_ids = _token_ids(model.generation_config.eos_token_id)
        """Tokens that end a sequence."""
        self._causal = torch.empty(0, 0)
        known = isinstance(model, BART_LIKE + T5_LIKE)
        self._takes_masks = known and model.config._attn_implementation == "sdpa"
        if not known:
            _probe(self)

    def processors(self, sampling: Sampling) -> TargetProcessors:
        """The model's own logits processors. Raises ValueError where one cannot be honoured."""
        return TargetProcessors(self.model, sampling)

    def max_new_tokens(self, source: Source, wanted: int) -> int:
        """Tokens that can be generated: as many as wanted, within the decoder's positions."""
        if self.max_positions is None:
            return wanted
        # the last token is generated but never fed
        return min(wanted, self.max_positions + 1 - len(source.prefix))

    @torch.inference_mode()
    def encode(self, source: Source) -> SequenceState:
        """Run the encoder. Raises ValueError for an empty or over-long source."""
        length = len(source.input_ids)
        if length == 0:
            raise ValueError("the source holds no tokens; leave empty inputs out")
        if self.max_positions is not None and length > self.max_positions:
            raise ValueError(
                f"the source has {length} tokens but the target takes {self.max_positions}; "
                "shorten it or leave it out"
            )
        return SequenceState(self._encoder(input_ids=source.input_ids[None].to(self.device)))

    @torch.inference_mode()
    def score(
        self,
        states: Sequence[SequenceState],
        tokens: Sequence[Tensor],
        proposals: Sequence[Proposal],
    ) -> list[Score]:
        """Logits and hidden states of each sequence's draft.

        tokens holds all committed tokens of each sequence ([T], decoder prefix included); those
        not cached yet are fed in front of the draft. Raises ValueError for drafts that are no
        chains.
        """
        return [
            self._score_one(state, committed, proposal)
            for state, committed, proposal in zip(states, tokens, proposals, strict=True)
        ]

    @torch.inference_mode()
    def keep(self, state: SequenceState, path: Tensor) -> None:
        """Keep committed tokens and the accepted nodes of the last draft; forget the others.

        path [A] holds indices of the last proposal in rising order.
        """
        accepted = len(path)
        state.cached += state.fed
        state.fed = 0
        length = state.cached + accepted
        if length == state.cache.get_seq_length():  # nothing to forget
            state.cached = length
            return
        is_prefix = accepted == 0 or int(path[-1]) == accepted - 1
        for layer in state.cache.self_attention_cache.layers:
            if is_prefix:
                layer.keys = layer.keys[:, :, :length]
                layer.values = layer.values[:, :, :length]
            else:
                index = torch.cat([torch.arange(state.cached), path + state.cached])
                index = index.to(layer.keys.device)
                layer.keys = layer.keys.index_select(2, index)
                layer.values = layer.values.index_select(2, index)
        state.cached = length

    def _score_one(self, state: SequenceState, tokens: Tensor, proposal: Proposal) -> Score:
        drafted = len(proposal.tokens)
        if drafted > 1 and not proposal.is_chain:
            raise ValueError("this target scores chains; draft trees are not supported yet")
        fed = tokens[state.cached :]
        state.fed = len(fed)
        if drafted > 0:
            fed = torch.cat([fed, proposal.tokens.to(fed.device)])
        logits, hidden = self._forward(state, fed[None])
        rows = logits[0, -drafted - 1 :]
        if rows.dtype in (torch.float16, torch.bfloat16):
            rows = rows.float()
        return Score(rows, hidden[0, -drafted - 1 :])

    def _forward(self, state: SequenceState, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Feed tokens after the cached ones.

        Shapes: input_ids [1, N] -> logits [1, N, V], hidden [1, N, D].
        """
        model = self.model
        mask = self._mask(state.cached, input_ids.shape[1])
        if isinstance(model, BART_LIKE):
            hidden = self._decoder(
                input_ids=input_ids,
                attention_mask=mask,
                encoder_hidden_states=state.encoder_outputs[0],
                past_key_values=state.cache,
                use_cache=True,
            )[0]
            return model.lm_head(hidden) + model.final_logits_bias, hidden
        output = model(
            encoder_outputs=state.encoder_outputs,
            decoder_input_ids=input_ids,
            decoder_attention_mask=mask,
            past_key_values=state.cache,
            use_cache=True,
            output_hidden_states=True,
        )
        return output.logits, output.decoder_hidden_states[-1]

    def _mask(self, cached: int, new: int) -> Tensor | None:
        """Causal mask of new tokens over cached and new ones, ready made: [1, 1, new, all].

        None where the attention needs none or makes its own.
        """
        if not self._takes_masks:
            return None
        total = cached + new
        if total > self._causal.shape[0]:
            size = max(256, 2 * total)
            self._causal = torch.ones(size, size, dtype=torch.bool, device=self.device).tril()
        return self._causal[None, None, cached:total, :total]


def make_source(input_ids: Sequence[int] | Tensor, model: PreTrainedModel) -> Source:
    """A source from the tokenizer's ids, on the model's device.

    The decoder starts from decoder_start_token_id alone, as in `generate`; a forced first token
    is a logits processor.
    """
    config = model.generation_config
    start = config.decoder_start_token_id
    if start is None:
        start = config.bos_token_id
    if not isinstance(start, int):
        raise ValueError(
            f"the target's generation_config has decoder_start_token_id={start!r}; one token id "
            "is needed"
        )
    ids = torch.as_tensor(input_ids, dtype=torch.long, device=model.device)
    return Source(ids, torch.tensor([start], device=model.device))


def check_architecture(model: PreTrainedModel) -> None:
    """Refuse models whose decoder has no plain KV cache, from their configuration.

    Raises ValueError naming the model type.
    """
    config = model.config
    if not config.is_encoder_decoder:
        raise ValueError(
            f"{config.model_type!r} is no encoder-decoder model; only those can be targets for now"
        )
    if model.training:
        raise ValueError("the target is in training mode; call model.eval() first")
    settings = config.get_text_config(decoder=True).to_dict()
    for name in ("sliding_window", "attention_window", "num_state", "ngram"):
        if settings.get(name):
            _refuse(model, f"its configuration sets {name}")
    odd = set(settings.get("layer_types") or ()) - {"full_attention"}
    if odd:
        _refuse(model, f"it has {', '.join(sorted(odd))} layers")
    if model._is_stateful:
        _refuse(model, "it keeps a state that cannot be rolled back")


def _probe(target: CachedModel) -> None:
    """Draft, keep, draft again, and compare with one pass: a cache that is not plain differs.

    For families that are not known: some feed their last token only, or number positions by it.
    Raises ValueError.
    """
    model = target.model
    ids = torch.arange(8, device=model.device) + len(model.get_output_embeddings().weight) // 2
    source = make_source(ids, model)
    state = target.encode(source)
    path = torch.cat([source.prefix, ids])
    target.score([state], [path[:1]], [Proposal.chain(ids[:3])])
    target.keep(state, torch.arange(1))
    [cached] = target.score([state], [path[:3]], [Proposal.chain(path[3:])])
    _check_plain(model, state, len(path))
    [fresh] = target.score([target.encode(source)], [path[:1]], [Proposal.chain(path[1:])])
    seen, expected = cached.logits, fresh.logits[2:]
    if seen.shape != expected.shape or not torch.allclose(
        seen.float(), expected.float(), rtol=0.02, atol=0.02 * float(expected.float().std())
    ):
        _refuse(model, "with its cache it gives other logits than without")


def _check_plain(model: PreTrainedModel, state: SequenceState, length: int) -> None:
    """The cache must hold every fed token and the cross-attention's own part, nothing else."""
    for name, cache, wanted in (
        ("self-attention", state.cache.self_attention_cache, length),
        ("cross-attention", state.cache.cross_attention_cache, state.encoder_outputs[0].shape[1]),
    ):
        for layer in cache.layers or [None]:
            if type(layer) is not DynamicLayer or layer.get_seq_length() != wanted:
                _refuse(model, f"its {name} cache does not hold one state a token")


def _refuse(model: PreTrainedModel, reason: str) -> None:
    raise ValueError(
        f"a {model.config.model_type!r} target cannot be decoded speculatively: {reason}; "
        "families with a plain KV cache work (T5, BART, mBART, Pegasus, Marian, ...)"
    )


def _token_ids(value: int | Sequence[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
