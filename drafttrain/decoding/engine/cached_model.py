"""Language models with a KV cache that take chains and draft trees.

Targets and drafters share these operations. `extend_cache` keeps the common prefix of the cache and
the committed tokens and computes the rest, `extend_chains` appends a chain, `extend_trees` appends
tree nodes, of which `keep_columns` keeps one path. `score` and `keep` are a target's round.
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
    check_architecture,
    counts_last_token,
    device_of,
    position_limit,
    refuse,
    source_limit,
)
from drafttrain.decoding.engine.encoding import Encoder
from drafttrain.decoding.engine.engine import Engine
from drafttrain.decoding.engine.forward import TransformersBody
from drafttrain.decoding.engine.logits_processing import TargetProcessors
from drafttrain.decoding.engine.probe import probe
from drafttrain.decoding.engine.requests import ForwardOutput, ForwardRequest
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.engine.sources import check_length
from drafttrain.decoding.inference import without_gradients
from drafttrain.decoding.types import Proposal, Sampling, Source


class CachedModel:
    """A language model of Transformers, encoder-decoder or decoder-only, with a KV cache.

    Its own modules compute. It is tried on a few tokens first (`probe.py`): where trees have other
    logits than their paths it decodes chains, one sequence a call, and where drafting and dropping
    tokens changes its logits it is refused.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        draftable: Tensor | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """draftable [N]: of a drafter, the tokens that it drafts; None: all. vocabulary: of a
        drafter, its target's, whose embedding may be padded otherwise (`fit_scores`). Raises
        ValueError for a model that cannot be decoded with."""
        check_architecture(model)
        self.model = model
        self.device = device_of(model)
        self.is_encoder_decoder: bool = model.config.is_encoder_decoder
        self.source_limit = source_limit(model.config)
        """Most tokens of a source or prompt; None = no limit."""
        self.position_limit = position_limit(model.config)
        """Most tokens that the decoder can be fed, its prefix included; None = no limit."""
        self._settings: GenerationConfig | None = None  # the model's own, as they are when decoding
        self.eos_ids = _token_ids(model.generation_config.eos_token_id)
        """Tokens that end a sequence."""
        head = model.get_output_embeddings()  # quantised ones have no weight, FSMT's is a table
        if not (hasattr(head, "out_features") or hasattr(head, "weight")):
            refuse(model.config, "it has no single output projection over one vocabulary")
        own = head.out_features if hasattr(head, "out_features") else len(head.weight)
        self.row_size = own if vocabulary is None else vocabulary
        """Tokens that it gives logits for."""
        self.vocabulary = min(own, self.row_size)
        """Those of them that it knows: all others it never drafts."""
        other = None if self.row_size == own else self.row_size
        self.draftable: Tensor | None = None
        """The tokens that it drafts, in rising order; None: all. Others' scores say nothing."""
        if draftable is not None:
            self.draftable = draftable[draftable < self.row_size].to(self.device)
        self.tree_fault: str | None = None
        """Why trees do not work; None: they do."""
        self.engine = self._make_engine(other)

    def _make_engine(self, vocabulary: int | None) -> Engine:
        """The most capable engine under which the model's logits are its own. Raises ValueError."""
        encoder = Encoder(self.model) if self.is_encoder_decoder else None
        for placed in (True, False):
            body = TransformersBody(self.model, self.draftable, vocabulary, placed)
            limit = self.position_limit
            self.engine = Engine(body, encoder, limit, one_chain=not placed)
            fault = probe(self, trees=placed)
            if fault is None:
                return self.engine
            if placed:
                self.tree_fault = fault
        refuse(self.model.config, fault)

    @property
    def supports_tree_attention(self) -> bool:
        """Whether trees and `extend_trees` work: every token can be given a mask and a position."""
        return self.tree_fault is None

    def check_tree_attention(self) -> None:
        """Raise ValueError, with the remedy, where trees and `extend_trees` do not work."""
        if not self.supports_tree_attention:
            raise ValueError(
                f"a {self.model.config.model_type!r} model cannot be given a draft tree: "
                f"{self.tree_fault}; draft chains, or use another model"
            )

    def processors(self, sampling: Sampling) -> TargetProcessors:
        """The model's own logits processors. Raises ValueError where one cannot be honoured."""
        return TargetProcessors(self.model, sampling, self._settings)

    def under(self, generation_config: GenerationConfig) -> CachedModel:
        """The same model, decoding as another generation_config says instead of its own."""
        other = copy.copy(self)
        other._settings = generation_config
        other.eos_ids = _token_ids(generation_config.eos_token_id)
        return other

    def drafting_all(self) -> CachedModel:
        """The same drafter with a score for every token, as other programs run it; itself where it
        has them. Scores that were left out were not trained: they may win where they should not."""
        if self.draftable is None:
            return self
        return CachedModel(self.model, vocabulary=self.row_size)

    def max_new_tokens(self, source: Source, wanted: int) -> int:
        """Tokens that can be generated: as many as wanted, within the decoder's positions."""
        if self.position_limit is None:
            return wanted
        missing = 0 if source.chosen_from is None else 1
        # the last token is generated but never fed, though some families' `generate` counts it
        fed = 0 if counts_last_token(self.model) else 1
        return min(wanted, self.position_limit + fed - missing - len(source.prefix))

    def encode(self, source: Source) -> SequenceState:
        """`encode_all` of one source."""
        return self.encode_all([source])[0]

    def read(self, source: Source) -> Source:
        """The same source with a whole prefix and what the encoder makes of it, where there is one:
        it is not encoded again."""
        if not self.is_encoder_decoder:
            return source
        state = self.encode(source)
        return replace(state.source, encoded=state.encoded)

    @without_gradients
    def encode_all(self, sources: Sequence[Source]) -> list[SequenceState]:
        """States with nothing cached; runs the encoder, where there is one.

        Where tokens of a prefix are left to the model, the state's source has them. Raises
        ValueError for an empty or over-long source.
        """
        for source in sources:
            if source.is_text:
                check_length(len(source.input_ids), self.source_limit)
        states = self.engine.begin(sources)
        self._choose([state for state in states if state.source.chosen_from is not None])
        return states

    def _choose(self, states: Sequence[SequenceState]) -> None:
        """Complete the prefixes of these states, in one call."""
        if not states:
            return
        outputs = self.extend_caches([(state, state.source.prefix[:1]) for state in states])
        for state, output in zip(states, outputs, strict=True):
            source = state.source
            best = output.logits[0, source.chosen_from].argmax()
            chosen = source.chosen_from[best].view(1)
            prefix = torch.cat([source.prefix[:1], chosen, source.prefix[1:]])
            state.source = replace(source, prefix=prefix, chosen_from=None)

    def extend_cache(self, state: SequenceState, tokens: Tensor) -> ForwardOutput:
        """`extend_caches` of one sequence."""
        return self.extend_caches([(state, tokens)])[0]

    def extend_caches(self, asked: Sequence[tuple[SequenceState, Tensor]]) -> list[ForwardOutput]:
        """Cache exactly these tokens, feeding those that are missing, at least the last one.

        What a cache has in common with them is kept. Shapes: tokens [T] each, all committed tokens
        -> logits [1, V] after the last one, hidden [F, D] of those fed. Raises ValueError while
        branches are cached (see `SequenceState.forget`).
        """
        return self.forward_batch(
            [ForwardRequest(state, state.align(own), logits_to_keep=1) for state, own in asked]
        )

    def extend_chains(self, asked: Sequence[tuple[SequenceState, Tensor]]) -> list[ForwardOutput]:
        """Append a chain [N] to what is cached of each sequence -> logits [N, V], hidden [N, D]."""
        return self.forward_batch(
            [ForwardRequest(state, own.tolist(), len(own)) for state, own in asked]
        )

    def extend_trees(
        self, asked: Sequence[tuple[SequenceState, Tensor, Tensor, Tensor]]
    ) -> list[ForwardOutput]:
        """Append tokens that see only the columns marked visible, at positions of their own.

        Of each sequence its tokens [N], visible [N, C + N] bool (C cached columns, then the new
        ones; each token sees itself), positions [N] -> logits [N, V], hidden [N, D]. Raises
        ValueError where `supports_tree_attention` is false.
        """
        return self.forward_batch(
            [
                ForwardRequest(state, tokens.tolist(), len(tokens), visible, positions.tolist())
                for state, tokens, visible, positions in asked
            ]
        )

    @without_gradients
    def forward_batch(
        self, requests: Sequence[ForwardRequest], layers: Sequence[int] = ()
    ) -> list[ForwardOutput]:
        """Run the requests in shared calls; at most one request per sequence.

        layers: decoder layers whose outputs are returned too. Raises ValueError for trees if
        `supports_tree_attention` is false, for a chain after tree nodes that are still cached, and
        for more tokens than the model has positions.
        """
        for request in requests:
            if request.visible is not None:
                self.check_tree_attention()
            elif request.state.chain < request.state.cached:
                raise ValueError("branches are cached; forget them before feeding a chain")
            self._check_positions(max(request.token_positions) + 1)
        return self.engine.forward_batch(requests, layers)

    @without_gradients
    def keep_columns(self, state: SequenceState, columns: Sequence[int], behind: int = 0) -> None:
        """Keep these cached columns, which are one path from the first token on; drop the others.

        How a drafter keeps those branches of its tree that were accepted: it may be fed a chain
        again afterwards. Costs nothing where the columns are the first ones in order. behind: so
        many of the first columns, a chain, are kept too and not named. Raises ValueError for
        columns that are not cached or not a path: positions must count from 0.
        """
        strays = [column for column in (behind - 1, *columns) if column >= state.cached]
        strays += [column for column in columns if column < 0]
        if strays:
            raise ValueError(f"column {strays[0]} cannot be kept; {state.cached} are cached")
        positions = state.positions_of(columns)
        if behind > state.chain or positions != [*range(behind, behind + len(columns))]:
            raise ValueError(
                f"columns {list(columns)} hold the positions {positions}, which are no path from "
                "the first token on; give the columns of one leaf and all that lead to it"
            )
        state.gather(behind, columns)

    @without_gradients
    def score(
        self,
        states: Sequence[SequenceState],
        tokens: Sequence[Tensor],
        proposals: Sequence[Proposal],
        layers: Sequence[int] = (),
    ) -> list[ForwardOutput]:
        """Logits of each sequence's draft, N + 1 rows each, and hidden states of all tokens fed,
        in one call for all.

        tokens holds all committed tokens of each sequence ([T], decoder prefix included); those
        not cached yet are fed in front of the draft. The outputs of some layers are kept too, where
        a drafter reads them. Raises ValueError for trees where `supports_tree_attention` is false.
        """
        requests = [
            self._scoring(state, committed, proposal)
            for state, committed, proposal in zip(states, tokens, proposals, strict=True)
        ]
        outputs = self.forward_batch(requests, layers)
        for request, committed in zip(requests, tokens, strict=True):
            request.state.committed = len(committed)
            if request.visible is not None:
                request.state.chain = len(committed)
        return outputs

    def score_all(
        self, asked: Sequence[tuple[SequenceState, Tensor, Proposal]]
    ) -> list[ForwardOutput]:
        """`score`, of a list of what belongs to a sequence."""
        return self.score(*zip(*asked, strict=True))

    @without_gradients
    def keep(
        self, state: SequenceState, path: Tensor, drafted: Sequence[int] | None = None
    ) -> None:
        """Keep committed tokens and the accepted nodes of the last draft; forget the others.

        path [A] holds indices of the last proposal in rising order; drafted, the proposal's tokens
        where the host did not know them when they were scored.
        """
        first = state.committed
        if drafted is not None:
            state.name(first, drafted)
        state.gather(first, [first + node for node in path.tolist()])

    def _scoring(self, state: SequenceState, tokens: Tensor, proposal: Proposal) -> ForwardRequest:
        """What is missing of the committed tokens, and the draft behind them."""
        missing = state.align(tokens)
        if proposal.is_on_device:
            return ForwardRequest(state, missing, len(proposal.tokens) + 1, drafted=proposal.tokens)
        nodes = proposal.tokens.tolist()
        rows = len(nodes) + 1
        if rows <= 2 or proposal.is_chain:
            return ForwardRequest(state, missing + nodes, rows)
        cached, length = state.cached, len(tokens)
        lines = ancestry(proposal.parents)
        depths = lines.sum(dim=1).tolist()
        visible = np.ones((len(missing) + len(nodes), length + len(nodes)), dtype=bool)
        for row in range(len(missing)):
            visible[row, cached + row + 1 :] = False
        visible[len(missing) :, length:] = lines
        positions = [*range(cached, length), *(length - 1 + depth for depth in depths)]
        return ForwardRequest(state, missing + nodes, rows, torch.from_numpy(visible), positions)

    def _check_positions(self, length: int) -> None:
        if self.position_limit is not None and length > self.position_limit:
            raise ValueError(
                f"{length} tokens are more than the {self.position_limit} positions of this "
                f"{self.model.config.model_type!r} model; generate or draft fewer"
            )


def ancestry(parents: Tensor) -> Tensor:
    """Which nodes of a draft lie on the path to each: its ancestors and itself.

    Shapes: parents [N], each before its children, -1 for roots -> [N, N] bool.
    """
    size = len(parents)
    lines = bytearray()
    for node, parent in enumerate(parents.tolist()):
        line = lines[parent * size : (parent + 1) * size] if parent >= 0 else bytearray(size)
        line[node] = True
        lines += line
    return torch.from_numpy(np.frombuffer(lines, dtype=bool).reshape(size, size))


def _token_ids(value: int | Sequence[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
