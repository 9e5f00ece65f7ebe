"""Lossless decoding follows the target's distribution exactly: enumerates production code.

One table of methods, on targets and drafters with three or four tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from transformers import (
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from drafttrain.config.methods import STOPS
from drafttrain.decoding import verifiers
from drafttrain.decoding.drafters import candidates
from drafttrain.decoding.drafters import cascade as cascades
from drafttrain.decoding.drafters.block_heads import BlockHeadsDrafter
from drafttrain.decoding.drafters.cascade import Level, cascade, review
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.tree import SeveralDrafters, TreeDrafter
from drafttrain.decoding.roles import Drafter, Randomness, StopPolicy, Verifier
from drafttrain.decoding.stopping import Cumulative, Entropy, FixedLength, Gain, HeadPolicy
from drafttrain.decoding.trees.chosen import Optimal
from drafttrain.decoding.trees.drawn import Branching, Paths
from drafttrain.decoding.trees.fixed import binary_tree
from drafttrain.decoding.trees.shapes import Shape
from drafttrain.decoding.trees.verifiers import KSeq, MultiRound, RecursiveRejection, TargetWalk
from drafttrain.decoding.types import DraftState, Proposal, Sampling, Source
from drafttrain.decoding.verifiers import BlockVerification, RejectionSampling, residual
from drafttrain.models.acceptance_head import AcceptanceHead, AcceptanceHeadConfig
from drafttrain.models.draft_states import ROW_FEATURES, StateKind
from tests.decoding.decoded import decoder_of
from tests.decoding.drafters.watched import Watched
from tests.decoding.enumeration import EnumeratedRandomness, enumerate_law, total_variation
from tests.decoding.expected import expected_probs
from tests.decoding.toys import (
    CONVENTIONS,
    EOS,
    ToyDrafter,
    ToyModel,
    autoregressive_law,
    toy_drafter,
    toy_prompt,
    toy_source,
)
from tests.tiny_drafters import block_heads, parallel
from tests.tiny_models import tiny_model

REJECTION, BLOCK = RejectionSampling(), BlockVerification()
TARGET_WIDTH = 16
COPIES = {3: [1, 2, 2], 4: [2, 3, 1, 2]}
"""Max-Gram's table of next tokens, by size of the vocabulary."""
Make = Callable[[int, float], Drafter]
"""(vocabulary, share of excluded tokens) -> a drafter."""


@dataclass(frozen=True)
class Method:
    """A drafter for toy targets, with its verifier and stop policy."""

    make: Make
    verifier: Verifier = REJECTION
    stop: StopPolicy = FixedLength(2)
    vocabulary: int = 3
    source: Source = toy_prompt()


def drawn(vocabulary: int, excluded: float) -> Drafter:
    return ToyDrafter(2, vocabulary, excluded)


def point(vocabulary: int, excluded: float) -> Drafter:
    return ToyDrafter(2, vocabulary, excluded, point=True)


def causal(vocabulary: int, excluded: float, seed: int = 2) -> CausalDrafter:
    return CausalDrafter(ToyModel(seed, vocabulary, excluded))


def copies(vocabulary: int, excluded: float) -> Drafter:
    return MaxGramDrafter(COPIES[vocabulary])


def heads(vocabulary: int, excluded: float) -> Drafter:
    shape = {"hidden_size": TARGET_WIDTH, "vocab_size": vocabulary}
    model = tiny_model("llama", **shape, bos_token_id=2)
    return BlockHeadsDrafter(block_heads(**shape), model)


def masks(vocabulary: int, excluded: float) -> Drafter:
    return parallel(vocab_size=vocabulary, bos_token_id=2)


def tree(shape: Shape) -> Make:
    return lambda *given: TreeDrafter(causal(*given), shape)


def several(vocabulary: int, excluded: float) -> Drafter:
    """SpecInfer with two drafters: each sibling has the row that it was drawn from."""
    both = (TreeDrafter(causal(vocabulary, excluded, seed), Paths(1)) for seed in (2, 3))
    return SeveralDrafters([*both])


def levels(models: int, matrix: Sequence[Sequence[int]], leniency: float = 1.0) -> Make:
    """Returns a cascade of language models and, if the matrix has one more row, copies."""

    def make(vocabulary: int, excluded: float) -> Drafter:
        drafters = [causal(vocabulary, excluded, 2 + i) for i in range(models)]
        drafters += [copies(vocabulary, excluded)] * (len(matrix) - models)
        several = [Level(f"level {i}", drafter) for i, drafter in enumerate(drafters)]
        return cascade(several, matrix, leniency)

    return make


def slots(verifier: Verifier = REJECTION, shape: Shape | None = None, **settings) -> Method:
    def make(vocabulary: int, excluded: float) -> Drafter:
        drafter = toy_drafter(**settings)
        return drafter if shape is None else TreeDrafter(drafter, shape)

    return Method(make, verifier, vocabulary=4, source=toy_source())


def head(depth: int, state: StateKind) -> StopPolicy:
    """Returns a policy whose head has weights so large that predictions vary between states."""
    torch.manual_seed(2 - depth)
    width = 4 + (ROW_FEATURES if state == "drawn" else 0)
    made = AcceptanceHead(AcceptanceHeadConfig(hidden_size=width, depth=depth, state=state))
    for parameter in made.parameters():
        parameter.data.normal_()
    return HeadPolicy(made, 0.5, 3)


def looks(state: DraftState, digits: float) -> bool:
    """Stops by every digit of the newest row that is shown, like a fair coin. No row that depends
    on a token is passed to the policy before it decides on that token."""
    return not state.logits or int(state.logits[-1].sum() * 10**digits) % 2 == 0


def cut_where_unsure(keep: bool) -> Make:
    """Ends a draft at its first token with probability below 0.4, after drawing it. Keeping that
    token is exact; dropping it is biased."""

    def watch(session, source, tokens, target_state, stop):
        draft = yield from session.propose(tokens, target_state, stop)
        if draft.draft_probs is None:
            return draft
        own = draft.draft_probs.gather(1, draft.tokens[:, None])[:, 0]
        sure = int((own >= 0.4).long().cumprod(0).sum())
        length = min(sure + keep, len(own))
        return Proposal.chain(draft.tokens[:length], draft.draft_probs[:length])

    return lambda *given: Watched(causal(*given), watch)


ALL_STOPS = {
    "fixed": FixedLength(3),
    "entropy": Entropy(0.6, 3),
    "head": head(2, "token"),
    "head of drawn states": head(1, "drawn"),
    "cumulative": Cumulative(0.7, 3),
}
LOOKS = StopPolicy(STOPS["entropy"], looks, 2.0, 3)
CHAINS = {
    "none": Method(lambda *_: NoDrafter(), stop=FixedLength(1)),
    "drawn": Method(drawn),
    "drawn, by blocks": Method(drawn, BLOCK),
    "point mass": Method(point),
    "point mass, by blocks": Method(point, BLOCK),
    "copies": Method(copies),
    "copies, by blocks": Method(copies, BLOCK),
    "heads": Method(heads),
    "heads that stop": Method(heads, stop=LOOKS),
    "masks": Method(masks, vocabulary=4),
    "masks that stop": Method(masks, stop=LOOKS.capped(2), vocabulary=4),
    "vertical": Method(levels(2, [[2, 0], [1]])),
    "vertical, lenient": Method(levels(2, [[2, 0], [2]], 3.0)),
    "vertical, lenient, by blocks": Method(levels(2, [[2, 0], [2]], 3.0), BLOCK),
    "over copies, lenient": Method(levels(1, [[2, 0], [2]], 3.0)),
    "over a model, then copies, lenient": Method(levels(2, [[2, 0, 0], [1, 1], [0]], 3.0)),
    "horizontal": Method(levels(2, [[1, 1], [0]])),
    "horizontal, then copies": Method(levels(1, [[1, 1], [0]])),
    "of depth two": Method(levels(1, [[2, 0], [10]], 1.5)),
    "of depth two, then copies": Method(levels(1, [[1, 1], [1]], 1.5)),
    "of depth three": Method(levels(2, [[1, 1, 0], [1, 0], [10]], 2.0)),
    "of depth three, by blocks": Method(levels(2, [[1, 1, 0], [1, 0], [10]], 2.0), BLOCK),
    "cut after an unsure token": Method(cut_where_unsure(keep=True)),
    "cut after an unsure token, by blocks": Method(cut_where_unsure(keep=True), BLOCK),
    "few tokens": slots(draftable=[0, 2, 3]),
    "few tokens, previous tokens": slots(draftable=[0, 2, 3], previous_token_rank=3),
}
CHAINS |= {name: slots(**settings) for name, settings in CONVENTIONS.items()}
for name in ("anchored, previous tokens", "paper"):
    CHAINS[f"{name}, that stops"] = replace(CHAINS[name], stop=LOOKS)
CHAINS |= {
    f"{name}, by {rule.name}": Method(causal, rule, stop)
    for name, stop in ALL_STOPS.items()
    for rule in (REJECTION, BLOCK)
}
OPTIMAL = Optimal(4)
TREES = {
    "paths k-seq": Method(tree(Paths(2)), KSeq),
    "paths multi-round": Method(tree(Paths(2)), MultiRound),
    "paths walk": Method(tree(Paths(2)), TargetWalk),
    "rsd-c": Method(tree(Branching((2, 1))), RecursiveRejection),
    "rsd-c walk": Method(tree(Branching((2, 2))), TargetWalk),
    "opt-tree": Method(tree(OPTIMAL), TargetWalk, Gain(0.1, 2)),
    "opt-tree, cooler": Method(tree(Optimal(4, draft_temperature=0.3)), TargetWalk),
    "binary": Method(tree(binary_tree(6)), TargetWalk),
    "several multi-round": Method(several, MultiRound),
    "several walk": Method(several, TargetWalk),
}
OVER_SLOTS = {
    name: slots(verifier, shape, slots="paper", previous_token_rank=3)
    for name, verifier, shape in (
        ("slots, paths", MultiRound, Paths(2)),
        ("slots, rsd-c", RecursiveRejection, Branching((2, 1))),
        ("slots, opt-tree", TargetWalk, OPTIMAL),
    )
}
METHODS = CHAINS | TREES | OVER_SLOTS
SETTINGS = {
    "top-k": (Sampling(1.3, top_k=2), 0.0),
    "top-p": (Sampling(1.5, top_p=0.8), 0.0),
    "supports apart": (Sampling(1.0), 0.4),
    "temperature 1": (Sampling(1.0), 0.0),
}
"""Sampling, and the share of tokens that target and drafter exclude, each for itself."""
FURTHER = {
    "temperature 0.6": (Sampling(0.6), 0.0),
    "min-p": (Sampling(1.3, min_p=0.3), 0.0),
    "all": (Sampling(0.8, top_k=3, top_p=0.9), 0.0),
    "greedy": (Sampling(0.0), 0.0),
}
CASES = [(name, setting) for name in CHAINS for setting in SETTINGS]
CASES += [(name, setting) for name in TREES for setting in [*SETTINGS][:3]]
CASES += [(name, setting) for name in OVER_SLOTS for setting in [*SETTINGS][:2]]
"""Trees have supports of one or two tokens, so that every outcome of several rounds is visited;
single rounds under full supports are enumerated in trees/."""
CASES += [(name, setting) for name in [*CHAINS][:5] for setting in FURTHER]


def bias(
    method: Method,
    sampling: Sampling,
    excluded: float = 0.0,
    target: ToyModel | None = None,
    missing: set[int] | None = None,
) -> float:
    """Returns the total variation distance of the output distribution from the target's, for a
    draft's whole round and its bonus token.

    missing: collects by how much drafts without EOS were shorter than they could be.
    """
    target = target or ToyModel(1, method.vocabulary, excluded, TARGET_WIDTH)
    drafter, longest = method.make(method.vocabulary, excluded), method.stop.longest + 1
    missing = set() if missing is None else missing

    def run(randomness: Randomness) -> tuple[int, ...]:
        own = method.stop, method.verifier, sampling, lambda _: randomness
        [output] = decoder_of(target, drafter, *own).decode_all([method.source], longest)
        left = longest
        for played in output.rounds:
            if left > 1 and EOS not in played.drafted:
                missing.add(min(method.stop.longest, left - 1) - len(played.drafted))
            left -= len(played.emitted)
        return tuple(output.tokens)

    return total_variation(enumerate_law(run), autoregressive_law(target, sampling, longest))


@pytest.mark.covered
@pytest.mark.parametrize(("name", "setting"), CASES)
def test_sampling_follows_the_target_exactly(name, setting):
    method, missing = METHODS[name], set()
    assert bias(method, *(SETTINGS | FURTHER)[setting], missing=missing) < 1e-12
    if setting == "temperature 1" and method.stop.rule.name != "fixed":
        assert 0 in missing and max(missing) > 0  # some drafts end early


@pytest.mark.parametrize("name", ["anchored, previous tokens", "paper, previous tokens"])
def test_sampling_is_exact_with_coupled_candidates(name, monkeypatch):
    monkeypatch.setattr(candidates, "CANDIDATES", 2)
    assert bias(METHODS[name], Sampling(1.0)) < 1e-12


PROCESSORS = {
    "repetition": RepetitionPenaltyLogitsProcessor(1.8),
    "no token twice": NoRepeatNGramLogitsProcessor(1),
    "nothing after EOS": NoBadWordsLogitsProcessor([[EOS, token] for token in range(4)]),
}
"""The last two exclude every token in some rows after an EOS within a draft."""
PROCESSED = [*CHAINS][1:7]
PROCESSED += ["paths multi-round", "paths walk", "rsd-c", "opt-tree"]


@pytest.mark.covered
@pytest.mark.parametrize("name", PROCESSED)
@pytest.mark.parametrize("setting", PROCESSORS)
def test_sampling_under_logits_processors_follows_the_target_exactly(setting, name):
    sampling = Sampling(1.0, top_k=2 if name in TREES else 0)
    target = ToyModel(1, 4, width=TARGET_WIDTH, processors=[PROCESSORS[setting]])
    assert bias(replace(METHODS[name], vocabulary=4), sampling, target=target) < 1e-12


def first_rejected_coin(randomness: EnumeratedRandomness, rejection: Tensor) -> int:
    """Ends the draft at the first failed coin, as token-by-token rejection does."""
    return len(rejection) - accept_run(randomness, 1.0 - rejection.flip(0))


def with_the_reviewers_rows(inner: Proposal, logits: Tensor, sampling: Sampling, *rest: object):
    """Claims that lenient tokens follow the reviewer's rows."""
    emitted, _ = review(inner, logits, sampling, *rest)
    return emitted, expected_probs(logits, sampling)[: len(emitted)]


accept_run = EnumeratedRandomness.accept_run


def unconditional(weights: Sequence[float], *_: object) -> Tensor:
    """Accepts each prefix with its weight, whatever longer ones were tested before."""
    return torch.tensor([1.0 - weight for weight in weights[1:]])


WRONG: list[tuple[str, object, str, object]] = [
    ("drawn", verifiers, "residual", lambda target, *_: target),
    ("drawn, by blocks", verifiers, "residual", lambda target, draft, _: residual(target, draft)),
    ("drawn, by blocks", verifiers, "block_rejection", unconditional),
    ("drawn, by blocks", EnumeratedRandomness, "accept_run", first_rejected_coin),
    ("vertical, lenient", cascades, "review", with_the_reviewers_rows),
]


@pytest.mark.parametrize(("name", "place", "attribute", "wrong"), WRONG)
def test_control_a_wrong_rule_is_detected(name, place, attribute, wrong, monkeypatch):
    monkeypatch.setattr(place, attribute, wrong)
    assert bias(METHODS[name], Sampling(1.5, top_p=0.8)) > 1e-3


def test_control_a_token_dropped_for_its_own_value_is_detected():
    for rule in (REJECTION, BLOCK):
        assert bias(Method(cut_where_unsure(keep=False), rule), Sampling(1.0)) > 0.01
