"""A target and drafters with three or four tokens, whose distributions are known exactly.

`ToyTarget` has the interface of `CachedModel`; its logits are a random table over whole paths, so
a wrong row, path or rollback changes the output distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from drafttrain.config.kinds import DrawKind
from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.engine.logits_processing import RowProcessors
from drafttrain.decoding.engine.requests import ForwardOutput
from drafttrain.decoding.roles import Randomness, StopPolicy
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.target_states import TargetRequirements, TargetState
from drafttrain.decoding.types import DraftState, Proposal, Sampling, Source
from drafttrain.models.spec_drafter.model import SpecDrafter
from tests.decoding.expected import Law, law_of_sampling
from tests.tiny_drafters import small_drafter

START, EOS = 0, 1
TARGET_WIDTH = 16
"""Size of a `ToyTarget`'s hidden state."""


class OneByOne:
    """Adds the batched methods of `CachedModel` to a model that has those for one sequence."""

    requires = TargetRequirements()
    """The target's states that it reads when it drafts."""

    def encode_all(self, sources: Sequence[Any]) -> list[Any]:
        return [self.encode(source) for source in sources]

    def extend_caches(self, given: Sequence[tuple]) -> list[ForwardOutput]:
        return [self.extend_cache(*one) for one in given]

    def extend_chains(self, given: Sequence[tuple]) -> list[ForwardOutput]:
        return [self.request(*one) for one in given]

    def extend_trees(self, given: Sequence[tuple]) -> list[ForwardOutput]:
        return [self.extend(*one) for one in given]

    def score_all(self, given: Sequence[tuple]) -> list[ForwardOutput]:
        return [self.score([state], [tokens], [draft])[0] for state, tokens, draft in given]


class LogitsTable:
    """Random logits for every path of tokens, equal on every call."""

    def __init__(self, seed: int, vocabulary: int, excluded: float = 0.0) -> None:
        self._seed, self._vocabulary, self._excluded = seed, vocabulary, excluded
        self._rows: dict[tuple[int, ...], Tensor] = {}

    def __getitem__(self, path: Sequence[int]) -> Tensor:
        """Returns logits [V] after a path; each token except one is excluded with a fixed
        probability."""
        key = tuple(path)
        if key not in self._rows:
            generator = torch.Generator().manual_seed(hash((self._seed, *key)) % 2**31)
            draw = {"generator": generator, "dtype": torch.float64}
            row = 1.5 * torch.randn(self._vocabulary, **draw)
            out = torch.rand(self._vocabulary, **draw) < self._excluded
            out[int(torch.randint(self._vocabulary, (), generator=generator))] = False
            self._rows[key] = row.masked_fill(out, -torch.inf)
        return self._rows[key]


class ScriptedRows:
    """Logits whose arg-max after a path depends on its length alone."""

    def __init__(self, tokens: Sequence[int], vocabulary: int) -> None:
        self._tokens, self._rows = tokens, 3.0 * torch.eye(vocabulary)

    def __getitem__(self, path: Sequence[int]) -> Tensor:
        return self._rows[self._tokens[min(len(path), len(self._tokens)) - 1]]


class ToyProcessors:
    """A toy target's processors, the same for every sequence."""

    def __init__(self, *processors: LogitsProcessor) -> None:
        self.processors = processors
        self.change_logits = bool(processors)

    def start(self, source: Source, max_new_tokens: int) -> RowProcessors:
        return RowProcessors(self.processors)


class ToyState(list):
    """The cached tokens of a sequence."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source


class ToyTarget(OneByOne):
    """Scores trees from a table. A state holds the tokens that `keep` left in the cache.

    Hidden states also come from a table, so drafts depend on which state a drafter reads.
    """

    def __init__(
        self,
        seed: int,
        vocabulary: int = 3,
        excluded: float = 0.0,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.table = LogitsTable(seed, vocabulary, excluded)
        self.processed = processors
        self.hidden = LogitsTable(seed + 2000, TARGET_WIDTH)
        self.eos_ids = frozenset([EOS])

    def check_tree_attention(self) -> None:
        """Trees are supported."""

    def processors(self, sampling: Sampling) -> ToyProcessors:
        return ToyProcessors(*self.processed)

    def max_new_tokens(self, source: Source, wanted: int) -> int:
        return wanted

    def encode(self, source: Source) -> ToyState:
        return ToyState(source)

    def score(
        self,
        states: Sequence[ToyState],
        tokens: Sequence[Tensor],
        proposals: Sequence[Proposal],
        layers: Sequence[int] = (),
    ) -> list[ForwardOutput]:
        scores = []
        for state, committed, proposal in zip(states, tokens, proposals, strict=True):
            assert committed[: len(state)].tolist() == state, "the cache holds other tokens"
            state += committed[len(state) :].tolist()
            paths = [state.copy()]
            for token, parent in zip(
                proposal.tokens.tolist(), proposal.parents.tolist(), strict=True
            ):
                paths.append([*paths[parent + 1], token])
            rows = [self.table[path] for path in paths]
            state += proposal.tokens.tolist()
            state.append(-1 - len(proposal.tokens))  # encodes the number of draft tokens at the end
            hidden = torch.stack([self.hidden[path] for path in paths])
            scores.append(ForwardOutput(torch.stack(rows), hidden))
        return scores

    def keep(self, state: ToyState, path: Tensor, drafted=None) -> None:
        drafted = -1 - state.pop()
        first = len(state) - drafted
        kept = [state[first + node] for node in path.tolist()]
        del state[first:]
        state += kept


class ToyModel(OneByOne):
    """A decoder-only `CachedModel` for drafters: logits and hidden states from tables of paths.

    The hidden state at a token depends on the whole path including the token. A sequence's cache
    is a list of tokens, one per column, and follows any sequence that it is given for a review.
    """

    def __init__(
        self, seed: int, vocabulary: int = 3, excluded: float = 0.0, width: int = 4
    ) -> None:
        self.model = SimpleNamespace(device="cpu", config=SimpleNamespace(is_encoder_decoder=False))
        self.source_limit: int | None = None
        self.position_limit: int | None = None
        self.eos_ids = frozenset([EOS])
        self.draftable = None
        self.vocabulary = vocabulary
        self.table = LogitsTable(seed, vocabulary, excluded)
        self.hidden = LogitsTable(seed + 1000, width)

    def check_tree_attention(self) -> None:
        """Branches are supported."""

    def encode(self, source: Source) -> ToyColumns:
        return ToyColumns()

    def extend_cache(self, state: ToyColumns, tokens: Tensor) -> ForwardOutput:
        assert not state.has_branches, "branches are cached"
        state[:] = tokens.tolist()
        return ForwardOutput(self.table[state][None], self.hidden[state][None])

    def request(self, state: ToyColumns, tokens: Tensor) -> ForwardOutput:
        assert not state.has_branches, "branches are cached"
        state += tokens.tolist()
        return ForwardOutput(self.table[state][None], self.hidden[state][None])

    def extend(
        self, state: ToyColumns, tokens: Tensor, visible: Tensor, positions: Tensor
    ) -> ForwardOutput:
        state.has_branches = True
        state += tokens.tolist()
        paths = [[state[c] for c in row.nonzero()[:, 0].tolist()] for row in visible]
        assert [len(path) - 1 for path in paths] == positions.tolist()
        return ForwardOutput(
            torch.stack([self.table[path] for path in paths]),
            torch.stack([self.hidden[path] for path in paths]),
        )

    def keep_columns(self, state: ToyColumns, columns: Sequence[int], prefix: int = 0) -> None:
        state.has_branches = False
        state[prefix:] = [state[column] for column in columns]

    def score(
        self, states: Sequence[ToyColumns], tokens: Sequence[Tensor], proposals: Sequence[Proposal]
    ) -> list[ForwardOutput]:
        scores = []
        for state, committed, proposal in zip(states, tokens, proposals, strict=True):
            state[:] = [*committed.tolist(), *proposal.tokens.tolist()]
            state.committed = len(committed)
            paths = [state[:length] for length in range(state.committed, len(state) + 1)]
            rows = torch.stack([self.table[path] for path in paths])
            scores.append(ForwardOutput(rows, torch.zeros(len(rows), 1)))
        return scores

    def keep(self, state: ToyColumns, path: Tensor) -> None:
        del state[state.committed + len(path) :]


class ToyColumns(list):
    """Cached tokens, one per column."""

    has_branches = False
    committed = 0

    @property
    def cached(self) -> int:
        return len(self)


@dataclass
class ToyDrafter:
    """Drafts like a block drafter: an independent row per slot, given the committed tokens.

    point=True proposes each row's arg-max as a point mass instead of sampling.
    """

    seed: int
    vocabulary: int = 3
    excluded: float = 0.0
    point: bool = False
    name: str = "toy"
    provides = frozenset({"logits", "hidden"})
    requires = TargetRequirements()
    drafts_trees = False

    def __post_init__(self) -> None:
        self.table = LogitsTable(self.seed, self.vocabulary, self.excluded)

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        return "deterministic" if self.point else "iid"

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> ToySession:
        return ToySession(self, sampling, randomness)


@dataclass
class ToySession:
    drafter: ToyDrafter
    sampling: Sampling
    randomness: Randomness

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> Proposal:
        rows = []
        while stop.should_draft(DraftState(depth=len(rows))):
            slot = [*tokens.tolist(), -len(rows) - 1]
            rows.append(self.drafter.table[slot])
        if not rows:
            return Proposal.empty()
        draft_probs = warp(torch.stack(rows), self.sampling)
        if self.drafter.point:
            return Proposal.chain(draft_probs.argmax(dim=-1))
        return Proposal.chain(self.randomness.categorical(draft_probs), draft_probs)


def autoregressive_law(target: ToyTarget, sampling: Sampling, longest: int) -> Law:
    """Returns the output distribution of plain sampling, computed from the table."""
    processors = LogitsProcessorList(target.processed)

    def logits(tokens: tuple[int, ...]) -> Tensor:
        path = (START, *tokens)
        return processors(torch.tensor([path]), target.table[path][None])[0]

    return law_of_sampling(logits, sampling, longest, EOS)


def toy_source(*prefix: int) -> Source:
    return Source.of_text(torch.tensor([2]), torch.tensor([START, *prefix]))


def toy_prompt(*prefix: int) -> Source:
    """Returns the source of a decoder-only model, which continues the prompt."""
    return Source.of_text(torch.tensor([START, *prefix]), torch.tensor([START, *prefix]))


CONVENTIONS = {
    "anchored": {"slots": "anchored"},
    "anchored, previous tokens": {"slots": "anchored", "previous_token_rank": 3},
    "paper": {"slots": "paper"},
    "paper, previous tokens": {"slots": "paper", "previous_token_rank": 3},
    "paper, bidirectional": {"slots": "paper", "prefix_attention": "bidirectional"},
}


def excite(drafter: SpecDrafter) -> SpecDrafter:
    """Sets random weights large enough that all slots have different outputs."""
    torch.manual_seed(5)
    for parameter in drafter.parameters():
        parameter.data.normal_(std=0.7)
    return drafter.double().eval()


def toy_drafter(**settings) -> BlockDrafter:
    return BlockDrafter(excite(small_drafter(4, 8, 3, **settings)))
