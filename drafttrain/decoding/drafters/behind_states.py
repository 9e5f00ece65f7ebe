"""A drafter behind the target's own states (`models/state_drafter.py`).

What is verified the target has read: the drafter's cache takes the target's keys and values of it,
and its slots are fed the target's hidden states at the row that the last committed token came from.
It drafts a block in one call, whose later slots may be told the token drafted before them, or token
by token; either way a draft depends on committed tokens and earlier draws alone, so rejection
sampling stays lossless.
Nothing is drafted before the target's first call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafttrain.decoding.drafters.candidates import Link
from drafttrain.decoding.drafters.causal import CausalSession
from drafttrain.decoding.drafters.parallel import ParallelSession
from drafttrain.decoding.drafters.slots import BLOCKS_AT_ONCE, SlotDrafter, Slots
from drafttrain.decoding.engine.architectures import check_states, position_limit
from drafttrain.decoding.engine.calls import Feed, StepOutput
from drafttrain.decoding.engine.engine import Engine
from drafttrain.decoding.engine.forward import BatchedCall, CallOutput, DraftableHead, additive
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.inference import without_gradients
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.shared import Call, Steps
from drafttrain.decoding.target_states import TargetRequirements, TargetState
from drafttrain.decoding.types import Sampling, Source
from drafttrain.models.draftable import draftable_tokens
from drafttrain.models.previous_token import SHUT
from drafttrain.models.state_drafter import Reading, StateDrafter, read_target


class StateBody:
    """The layers of a state drafter over the engine's cache, and the target's output projection.

    What it is fed comes with the request (`Feed.embedded`).
    """

    cross_attends = False
    needs_key_positions = masks_sources = False

    def __init__(self, model: StateDrafter, output: nn.Module, draftable: Tensor | None) -> None:
        self.model, self.device = model, model.device
        self.output, self.modules = output, [model, output]
        self._head = None if draftable is None else DraftableHead(output, draftable)

    def prepared(self, layers: Sequence[int]) -> AbstractContextManager[None]:
        if self._head is not None:
            self._head.refresh()
        return nullcontext()

    def compute(self, call: BatchedCall) -> CallOutput:
        mask = additive(call.visible, self.model.dtype)[:, None]
        hidden = self.model.decoder(
            inputs_embeds=call.embedded.to(self.model.dtype),
            attention_mask=mask,
            position_ids=call.positions,
            past_key_values=call.cache,
            use_cache=True,
        )[0]
        scored = hidden if call.scored is None else hidden[:, call.scored]
        return CallOutput(self.project(scored), hidden)

    def project(self, hidden: Tensor) -> Tensor:
        """Scores of every token; `UNDRAFTED` of those never drafted. [..., D] -> [..., V]."""
        hidden = hidden.to(self.output.weight.dtype)
        scores = self.output(hidden) if self._head is None else self._head(hidden)
        scores = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
        return scores if self._head is None else self._head.drafted(scores)


class BehindStatesDrafter(SlotDrafter):
    """Drafts behind the states of the target that decodes.

    Raises ValueError for a target whose layers do not take positions by rotation alone.
    """

    name = "state-drafter"

    def __init__(self, model: StateDrafter, target: PreTrainedModel) -> None:
        check_states(target.config)
        config = model.config
        self.model, self.target = model.eval(), target
        self.longest_block: int = config.k
        """Most tokens of a draft: so many slots were trained."""
        self.position_limit = position_limit(target.config)
        """Most tokens that can be fed; None = no limit."""
        self.requires = TargetRequirements(
            tuple(config.state_layers),
            context_layers=tuple(config.context_layers),
            first_row=True,
        )
        ends = target.generation_config.eos_token_id
        self.eos_ids = frozenset([ends] if isinstance(ends, int) else ends or ())
        """Tokens that end a sequence."""
        self.embedding = target.get_input_embeddings().weight.detach()
        self.output = target.get_output_embeddings()
        self.vocabulary: int = self.output.out_features
        """Tokens that it has scores for."""
        self.no_token = len(self.embedding)
        """Stands for the token before a block, which its first slot is fed."""
        drafted = draftable_tokens(config, self.vocabulary)
        if drafted is not None:
            drafted = drafted.to(model.device)
        self.draftable = drafted
        """The tokens that it drafts, in rising order; None: all."""
        self.body = StateBody(model, self.output, drafted)
        self.engine = Engine(self.body, None, self.position_limit)
        self._read: tuple[Reading, Tensor] | None = None
        self.link = None if model.previous_token is None else self._make_link()
        """What later slots of a block are told of the token before them."""

    @torch.inference_mode()
    def _make_link(self) -> Link:
        """Features of every token, and of none behind them."""
        told = self.model.previous_token
        rows = self.output.weight.to(told.out.weight.dtype) @ told.out.weight
        features = F.pad(told.features(self.embedding), (0, 0, 0, 1), value=SHUT)
        return Link(told.hidden, rows, features)

    def open(
        self, source: Source, sampling: Sampling, randomness: Randomness
    ) -> BehindStatesSession | CausalSession:
        own = BehindStatesSequence(self, source)
        if self.model.config.drafts == "tokens":
            return CausalSession(self, own, sampling, randomness)
        return BehindStatesSession(self, own, sampling, randomness, self.link)

    @without_gradients
    def blocks_all(
        self, asked: Sequence[tuple[BehindStatesSequence, Tensor, int]]
    ) -> list[StepOutput]:
        """Rows and states of so many slots behind each sequence's committed tokens [T].

        Where others have drafted behind what is verified, the later slots go on.
        """
        feeds = []
        for own, tokens, slots in asked:
            own.take(tokens)
            fed = len(tokens) - own.verified - 1 + slots
            ids = [int(tokens[own.verified])] * fed
            feeds.append(own.feed(ids, 0, slots))
        return self.engine.call(feeds)

    @without_gradients
    def catch_up_all(
        self, asked: Sequence[tuple[BehindStatesSequence, Tensor]]
    ) -> list[StepOutput]:
        """The row behind all committed tokens [T] of each sequence."""
        feeds = []
        for own, tokens in asked:
            own.take(tokens)
            feeds.append(own.feed(tokens[own.verified :].tolist(), 0, 1))
        return self.engine.call(feeds)

    @without_gradients
    def feed_chains(self, asked: Sequence[tuple[BehindStatesSequence, Tensor]]) -> list[StepOutput]:
        """The rows behind more tokens [N] of each."""
        return self.engine.call(
            [own.feed(new.tolist(), own.drafted, len(new)) for own, new in asked]
        )

    def slots_along(
        self, source: Source, target_ids: Tensor, prefixes: Sequence[int], k: int
    ) -> Iterator[Slots]:
        """The blocks of k slots at some prefix lengths of a known output (`SlotDrafter`); none
        begins at prefix 0. Raises ValueError for more slots than were trained."""
        if k > self.longest_block:
            raise ValueError(
                f"blocks of k = {k} slots, but this state drafter has k = {self.longest_block} in "
                "its config.json; ask for as many or fewer"
            )
        reading, ids = self.read(source, target_ids)
        length = len(source.prefix)
        for start in range(0, len(prefixes), BLOCKS_AT_ONCE):
            own = list(prefixes[start : start + BLOCKS_AT_ONCE])
            anchors = torch.tensor(own, device=ids.device) + length - 1
            states = self.states_along(reading, ids, anchors, k)
            logits = self.body.project(states)
            previous = None
            if self.link is not None:
                places = torch.tensor(own)[:, None] + torch.arange(-1, k - 1)
                previous = target_ids.cpu()[places.clamp(max=len(target_ids) - 1)]
                previous[:, 0] = self.no_token
                previous = previous.to(states.device)
            yield Slots(own, states, partial(self._rows_after, states, logits, previous))

    def _rows_after(
        self, states: Tensor, logits: Tensor, previous: Tensor | None, blocks: Tensor, slot: int
    ) -> Tensor:
        """`Slots.rows` of states [A, K, D] and rows [A, K, V]; previous [A, K]."""
        states, logits = states[blocks, slot], logits[blocks, slot]
        if self.link is None or previous is None:
            return logits
        return self.link.after(states, logits, previous[blocks, slot])

    @torch.inference_mode()
    def read(self, source: Source, target_ids: Tensor) -> tuple[Reading, Tensor]:
        """What the target makes of a prompt and its output but the last token, and these; kept for
        the next call, as blocks of other lengths are often asked for."""
        ids = torch.cat([source.prefix, target_ids[:-1].to(source.prefix.device)])
        if self._read is None or not torch.equal(self._read[1], ids):
            self._read = read_target(self.target, self.model.config, ids[None]), ids
        return self._read

    @torch.inference_mode()
    def states_along(self, reading: Reading, ids: Tensor, anchors: Tensor, k: int) -> Tensor:
        """Hidden states of k slots behind these tokens of a text. In slots beyond the text, of a
        drafter that drafts token by token, stands its last token.

        Shapes: ids [T], anchors [A], none 0 -> [A, k, D].
        """
        model, depths = self.model, torch.arange(k, device=ids.device)
        positions = anchors[:, None] + depths
        told = anchors[:, None].expand(-1, k)
        if model.config.drafts == "tokens":
            told = positions.clamp(max=len(ids) - 1)
        said = model.of_anchors(reading.states[0, anchors - 1])
        fed = model.fed(
            said.repeat_interleave(k, 0),
            F.embedding(ids[told].flatten(), self.embedding),
            depths.repeat(len(anchors)),
        ).view(len(anchors), k, -1)
        places, count = torch.arange(len(ids), device=ids.device), len(anchors)
        text = (places < anchors[:, None, None]).expand(-1, k, -1)
        own = (depths <= depths[:, None]).expand(count, -1, -1)
        seen = torch.cat([text, own], 2)[:, None]
        mask = torch.zeros(seen.shape, dtype=model.dtype, device=ids.device)
        mask = mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)
        shared = [
            (keys.expand(count, -1, -1, -1), values.expand(count, -1, -1, -1))
            for keys, values in reading.keys_values
        ]
        return model(fed, positions, mask, shared)


class BehindStatesSession(ParallelSession):
    """Blocks of one sequence."""

    drafter: BehindStatesDrafter

    def told_first(self, tokens: Tensor) -> int:
        return self.drafter.no_token


class BehindStatesSequence:
    """What a state drafter has of one sequence: the target's columns, and its own drafts behind."""

    def __init__(self, drafter: BehindStatesDrafter, source: Source) -> None:
        self.drafter, self._source = drafter, source
        self.state: SequenceState | None = None
        self.verified = 0
        """Tokens that the target has read: the first of them not is the last committed one."""
        self._target_state: TargetState | None = None
        self._said = torch.empty(0)

    @property
    def drafted(self) -> int:
        """Columns behind those of the target."""
        assert self.state is not None
        return self.state.cached - self.verified

    def tokens(self, committed: Tensor) -> Tensor:
        return committed

    def longest(self, wanted: int, fed: int, target_state: TargetState | None) -> int:
        """Most tokens of a draft behind so many: a block has k slots, positions end somewhere, and
        the target must have read the prompt."""
        if target_state is None:
            return 0
        self._target_state = target_state
        most = min(wanted, self.drafter.longest_block - (fed - target_state.committed))
        if self.drafter.position_limit is not None:
            most = min(most, self.drafter.position_limit + 1 - fed)
        return max(0, most)

    def begin(self) -> Steps[BehindStatesSequence]:
        if self.state is None:
            self.state = yield Call(self.drafter.engine.begin, self._source)
        return self

    def take(self, tokens: Tensor) -> None:
        """Go on behind what the target has verified by now of these tokens [T]; drafts of before
        are dropped."""
        state, seen, drafter = self.state, self._target_state, self.drafter
        assert state is not None and seen is not None and seen.columns is not None
        state.settle(self.verified)
        known = seen.committed - 1
        if self.verified < known:
            layers = drafter.requires.context_layers
            found = seen.columns.keys_values(layers, self.verified, known)
            new = tokens[self.verified : known].tolist()
            drafter.engine.take(state, new, found.to(drafter.model.dtype))
            self.verified = known
        newest = [seen.hidden[layer][-1] for layer in drafter.model.config.state_layers]
        self._said = drafter.model.of_anchors(torch.stack(newest)[None])

    def feed(self, tokens: list[int], depth: int, rows: int) -> Feed:
        """Tokens in slots from this depth on, behind what is cached."""
        model, assigned = self.drafter.model, self.state
        assert assigned is not None
        ids = torch.tensor(tokens, device=self._said.device)
        depths = torch.arange(depth, depth + len(tokens), device=ids.device)
        embedded = F.embedding(ids, self.drafter.embedding)
        fed = model.fed(self._said.expand(len(tokens), -1, -1), embedded, depths)
        return Feed(assigned, tokens, rows, embedded=fed)
