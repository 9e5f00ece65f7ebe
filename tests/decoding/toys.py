"""A target and drafters with three or four tokens, whose distributions are known exactly.

`ToyModel` is a `CachedModel` whose logits are a random table over whole paths, so a wrong row, path
or rollback changes the output distribution. Hidden states also come from a table, so drafts depend
on which state a drafter reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from drafttrain.config.kinds import DrawKind
from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.logits_processing import RowProcessors
from drafttrain.decoding.engine.requests import ForwardOutput, ForwardRequest
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.roles import Randomness, StopPolicy
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.target_states import TargetRequirements
from drafttrain.decoding.types import DraftState, Proposal, Sampling, Source
from drafttrain.models.spec_drafter.model import SpecDrafter
from tests.decoding.expected import Law, law_of_sampling
from tests.tiny_drafters import small_drafter

START, EOS = 0, 1
NO_CACHE = SimpleNamespace(open=lambda _: 0, move=lambda *_: None)


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


class ToyEngine:
    """Runs forward requests with rows of tables: those of the path that each token attends to."""

    def __init__(self, model: ToyModel) -> None:
        self.model = model

    def begin(self, sources: Sequence[Source]) -> list[SequenceState]:
        return [SequenceState(NO_CACHE, one) for one in sources]

    def forward_batch(
        self, requests: Sequence[ForwardRequest], layers: Sequence[int] = ()
    ) -> list[ForwardOutput]:
        return [self._forward(request) for request in requests]

    def _forward(self, request: ForwardRequest) -> ForwardOutput:
        state, size = request.state, len(request.tokens)
        visible, positions = request.visible, list(request.token_positions)
        state.append(request.tokens, positions, visible is None)
        if visible is None:
            visible = torch.ones(size, state.cached).tril(state.cached - size)
        paths = [[state.tokens[c] for c in row.nonzero()[:, 0].tolist()] for row in visible]
        assert [len(path) - 1 for path in paths] == positions
        rows = [self.model.table[path] for path in paths[size - request.logits_to_keep :]]
        return ForwardOutput(
            torch.stack(rows), torch.stack([self.model.hidden[path] for path in paths])
        )


class ToyModel(CachedModel):
    """A decoder-only model: logits and hidden states [width] from tables of paths, and logits
    processors, the same for every sequence.

    The hidden state at a token depends on the whole path including the token.
    """

    eos_ids = frozenset([EOS])

    def __init__(
        self,
        seed: int,
        vocabulary: int = 3,
        excluded: float = 0.0,
        width: int = 4,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.model = SimpleNamespace(device="cpu", config=SimpleNamespace(is_encoder_decoder=False))
        self.device = torch.device("cpu")
        self.source_limit = self.position_limit = self.draftable = self.tree_fault = None
        self.vocabulary = vocabulary
        self.table = LogitsTable(seed, vocabulary, excluded)
        self.hidden = LogitsTable(seed + 1000, width)
        self.engine, self.processed = ToyEngine(self), processors

    def processors(self, sampling: Sampling) -> SimpleNamespace:
        return SimpleNamespace(
            change_logits=bool(self.processed), start=lambda *_: RowProcessors(self.processed)
        )


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

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> SimpleNamespace:
        def propose(tokens: Tensor, target_state: object, stop: StopPolicy) -> Proposal:
            rows = []
            while stop.should_draft(DraftState(depth=len(rows))):
                rows.append(self.table[[*tokens.tolist(), -len(rows) - 1]])
            if not rows:
                return Proposal.empty()
            draft_probs = warp(torch.stack(rows), sampling)
            if self.point:
                return Proposal.chain(draft_probs.argmax(dim=-1))
            return Proposal.chain(randomness.categorical(draft_probs), draft_probs)

        return SimpleNamespace(propose=propose)


def autoregressive_law(target: ToyModel, sampling: Sampling, longest: int) -> Law:
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
