"""Language models with a KV cache for chains and draft trees.

`forward_batch` runs forward requests of targets and drafters: chains, and tree nodes, of which
`keep_columns` keeps one path. `score` and `keep` are a target's round.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from drafttrain.decoding.engine.architectures import (
    WHISPER_LIKE,
    check_configuration,
    decoder_settings,
    device_of,
    position_limit,
    refuse,
    source_limit,
    unwrapped,
)
from drafttrain.decoding.engine.encoding import Encoder
from drafttrain.decoding.engine.engine import Engine
from drafttrain.decoding.engine.forward import TransformersBody
from drafttrain.decoding.engine.logits_processing import TargetProcessors
from drafttrain.decoding.engine.probe import probe
from drafttrain.decoding.engine.requests import ForwardOutput, ForwardRequest
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.engine.sources import check_length
from drafttrain.decoding.engine.speech import detect_languages
from drafttrain.decoding.inference import without_gradients
from drafttrain.decoding.padding import end_tokens
from drafttrain.decoding.types import Proposal, Sampling, Source


class CachedModel:
    """A Transformers language model, encoder-decoder or decoder-only, with a KV cache.

    The model's own modules compute. A probe on a few tokens runs first (`probe.py`): if tree nodes
    get other logits than their paths, the model decodes chains only, one sequence per call; if
    drafting and dropping tokens changes its logits, it is refused.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        draftable: Tensor | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """Checks and probes a model. Raises ValueError if it cannot be decoded speculatively.

        draftable [N]: the tokens that a drafter drafts; None: all. vocabulary: size of the target's
        logits, if this is a drafter (`fit_scores`); its embedding may be padded differently.
        """
        if model.training:
            raise ValueError("the model is in training mode; call model.eval() first")
        check_configuration(model.config, type(unwrapped(model)))
        self.model = model
        self.device = device_of(model)
        self.is_encoder_decoder: bool = model.config.is_encoder_decoder
        self.source_limit = source_limit(model.config)
        """Maximal number of tokens of a source or prompt; None: no limit."""
        self.position_limit = position_limit(model.config)
        """Number of decoder positions, for its prefix and all new tokens; None: no limit."""
        self._generation_config: GenerationConfig | None = None  # None: the model's current one
        head = model.get_output_embeddings()  # quantised: no weight; FSMT: an embedding
        if not (hasattr(head, "out_features") or hasattr(head, "weight")):
            refuse(model.config, "it has no single output projection over one vocabulary")
        own_size = head.out_features if hasattr(head, "out_features") else len(head.weight)
        self.row_size = own_size if vocabulary is None else vocabulary
        """V of its logits [..., V]."""
        self.vocabulary = min(own_size, self.row_size)
        """Number of tokens with logits of its own; it never drafts the others."""
        padded_size = None if self.row_size == own_size else self.row_size
        self.draftable: Tensor | None = None
        """The tokens that it drafts, in ascending order; None: all. Ignore the other logits."""
        if draftable is not None:
            self.draftable = draftable[draftable < self.row_size].to(self.device)
        self.tree_fault: str | None = None
        """Why trees do not work; None: they do."""
        if decoder_settings(model.config).get("attn_temperature_tuning"):
            # from `floor_scale` on, Llama 4 scales attention by the number of cached tokens, which
            # only long inputs would show
            self.tree_fault = (
                "its attention temperature counts cached tokens (attn_temperature_tuning)"
            )
        self.engine = self._make_engine(padded_size)

    def _make_engine(self, vocabulary: int | None) -> Engine:
        """Returns an engine for trees, or else for one chain per call. Raises ValueError if neither
        reproduces the model's logits."""
        encoder = Encoder(self.model) if self.is_encoder_decoder else None
        for trees in (True, False) if self.tree_fault is None else (False,):
            body = TransformersBody(self.model, self.draftable, vocabulary, explicit_masks=trees)
            self.engine = Engine(body, encoder, self.position_limit, one_chain=not trees)
            fault = probe(self, trees)
            if fault is None:
                return self.engine
            if trees:
                self.tree_fault = fault
        refuse(self.model.config, fault)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        return frozenset(end_tokens(self._generation_config or self.model.generation_config))

    @property
    def supports_tree_attention(self) -> bool:
        """Whether tree nodes can be computed: the model accepts any mask and position."""
        return self.tree_fault is None

    def check_tree_attention(self) -> None:
        """Raises ValueError if `supports_tree_attention` is false."""
        if not self.supports_tree_attention:
            raise ValueError(
                f"a {self.model.config.model_type!r} model does not support draft trees: "
                f"{self.tree_fault}; draft chains, or use another model"
            )

    def processors(self, sampling: Sampling) -> TargetProcessors:
        """Returns the model's logits processors. Raises ValueError if a setting is unsupported."""
        return TargetProcessors(self.model, sampling, self._generation_config)

    def under(self, generation_config: GenerationConfig) -> CachedModel:
        """Returns the same model with another generation_config."""
        other = copy.copy(self)
        other._generation_config = generation_config
        return other

    def drafting_all(self) -> CachedModel:
        """Returns the drafter with logits of all tokens, as other programs run it; those outside
        `draftable` were not trained, so a wrong one may be the largest."""
        return self if self.draftable is None else CachedModel(self.model, None, self.row_size)

    def max_new_tokens(self, source: Source, wanted: int) -> int:
        """Returns how many tokens can be generated: `wanted`, or what the positions allow."""
        if self.position_limit is None:
            return wanted
        prefix = len(source.prefix) + source.language_is_open
        # the last token is never an input; Whisper's `generate` counts its position anyway
        last = 0 if isinstance(self.model, WHISPER_LIKE) else 1
        return min(wanted, self.position_limit + last - prefix)

    def encode(self, source: Source) -> SequenceState:
        """Runs `encode_all` for one source."""
        return self.encode_all([source])[0]

    def read(self, source: Source) -> Source:
        """Returns the source with its complete prefix and encoder states, to encode it once."""
        if not self.is_encoder_decoder:
            return source
        state = self.encode(source)
        return replace(state.source, encoded=state.encoded)

    @without_gradients
    def encode_all(self, sources: Sequence[Source]) -> list[SequenceState]:
        """Runs the encoder, if there is one, and returns new states with an empty cache.

        Their sources have the detected language (`Source.language_is_open`) in the prefix. Raises
        ValueError for a source that is empty or too long.
        """
        for source in sources:
            if source.is_text:
                check_length(len(source.input_ids), self.source_limit)
        states = self.engine.begin(sources)
        named = detect_languages(self.model, sources, [state.encoded for state in states])
        for state, source in zip(states, named, strict=True):
            state.source = source
        return states

    def forward_batch(
        self, requests: Sequence[ForwardRequest], layers: Sequence[int] = ()
    ) -> list[ForwardOutput]:
        """Runs the requests in batched calls; at most one request per sequence.

        layers: decoder layers whose outputs are returned too. Raises ValueError for trees if
        `supports_tree_attention` is false, and for more tokens than the model has positions.
        """
        for request in requests:
            if request.visible is not None:
                self.check_tree_attention()
            else:
                assert request.state.chain == request.state.cached, "a chain after tree nodes"
            length, limit = max(request.token_positions) + 1, self.position_limit
            if limit is not None and length > limit:
                raise ValueError(
                    f"{length} tokens are more than the {limit} positions of this "
                    f"{self.model.config.model_type!r} model; generate or draft fewer"
                )
        return self.engine.forward_batch(requests, layers)

    @without_gradients
    def keep_columns(self, state: SequenceState, columns: Sequence[int], prefix: int = 0) -> None:
        """Keeps the first `prefix` columns and `columns`, which continue their path; drops others.

        A chain can follow then. columns: those of a node and all its ancestors, so their positions
        count from `prefix`.
        """
        positions, path = state.positions_of(columns), [*range(prefix, prefix + len(columns))]
        assert prefix <= state.chain and positions == path, "the columns are no path"
        state.gather(prefix, columns)

    def score(
        self, drafts: Sequence[tuple[SequenceState, Tensor, Proposal]], layers: Sequence[int] = ()
    ) -> list[ForwardOutput]:
        """Scores each sequence's draft in batched calls: N + 1 rows of logits, and hidden states.

        drafts: of each sequence its state, all committed tokens ([T], decoder prefix included) and
        the proposal. Committed tokens that are not cached are computed too. layers and errors as in
        `forward_batch`.
        """
        requests = [self._scoring(*draft) for draft in drafts]
        outputs = self.forward_batch(requests, layers)
        for request, (state, committed, _) in zip(requests, drafts, strict=True):
            state.committed = len(committed)
            if request.visible is not None:
                state.chain = len(committed)
        return outputs

    @without_gradients
    def keep(
        self, state: SequenceState, path: Tensor, drafted: Sequence[int] | None = None
    ) -> None:
        """Keeps the committed tokens and the accepted nodes of the last draft; drops the others.

        path [A]: indices into the last proposal in ascending order. drafted: the proposal's tokens,
        if they were still on the device when they were scored.
        """
        first = state.committed
        if drafted is not None:
            state.set_tokens(first, drafted)
        state.gather(first, [first + node for node in path.tolist()])

    def _scoring(self, state: SequenceState, tokens: Tensor, proposal: Proposal) -> ForwardRequest:
        """Builds the request: committed tokens that are not cached yet, then the draft."""
        missing = state.align(tokens)
        if proposal.is_on_device:
            return ForwardRequest(state, missing, len(proposal.tokens) + 1, drafted=proposal.tokens)
        nodes, cached, length = proposal.tokens.tolist(), state.cached, len(tokens)
        if len(nodes) < 2 or proposal.is_chain:
            return ForwardRequest(state, missing + nodes, len(nodes) + 1)
        ancestors = ancestry(proposal.parents)
        depths = ancestors.sum(dim=1).tolist()
        # committed tokens are causal; nodes see all of them, and their own ancestors
        visible = np.ones((len(missing) + len(nodes), length + len(nodes)), dtype=bool)
        for row in range(len(missing)):
            visible[row, cached + row + 1 :] = False
        visible[len(missing) :, length:] = ancestors
        positions = [*range(cached, length), *(length - 1 + depth for depth in depths)]
        mask = torch.from_numpy(visible)
        return ForwardRequest(state, missing + nodes, len(nodes) + 1, mask, positions)


def ancestry(parents: Tensor) -> Tensor:
    """Returns for each node of a draft which nodes are its ancestors or itself.

    Shapes: parents [N], each before its children, -1 for roots -> [N, N] bool.
    """
    size = len(parents)
    flat = bytearray()  # rows of the result; a node's row is its parent's and itself
    for node, parent in enumerate(parents.tolist()):
        row = flat[parent * size : (parent + 1) * size] if parent >= 0 else bytearray(size)
        row[node] = True
        flat += row
    return torch.from_numpy(np.frombuffer(flat, dtype=bool).reshape(size, size))
