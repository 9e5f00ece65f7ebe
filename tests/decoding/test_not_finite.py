"""Rows that are not finite accept nothing, raise an error if needed, and are ignored otherwise."""

import re

import pytest
import torch

from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.tree import TreeDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.sampling import sequence_randomness, warp
from drafttrain.decoding.stopping import HeadJudge
from drafttrain.decoding.trees.chosen import Optimal
from drafttrain.decoding.trees.drawn import Paths
from drafttrain.decoding.trees.fixed import eagle_tree
from drafttrain.decoding.types import DraftState, NotFinite, Proposal, Sampling, Source
from drafttrain.decoding.verifiers import make_verifier
from tests.decoding.decoded import decoder_of
from tests.decoding.toys import ToyDrafter, ToyModel, toy_source
from tests.export.pairs import make_head
from tests.tiny_drafters import tiny_drafter
from tests.tiny_models import VOCAB, tiny_model

GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.0)
RULES = ("rejection", "block", "recursive", "multi-round", "target-walk")
"""Sampling verifiers that accept chains."""
DRAFT = Proposal.chain(torch.tensor([2, 1]))
"""Tokens 2 and 1, of which the target accepts only the first."""
LOGITS = torch.tensor([[0.0, 0.0, 9.0], [9.0, 0.0, 0.0], [0.0, 9.0, 0.0]])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("rule", ["greedy", "spec-verification"])
def test_only_rows_on_the_accepted_path_are_checked(rule, value):
    verifier = make_verifier(rule, *((1, 0.0) if rule == "spec-verification" else ()))

    def verify(logits: torch.Tensor) -> list[int]:
        verdict = verifier.verify(DRAFT, logits, GREEDY, sequence_randomness(0, 0))
        return [*DRAFT.tokens[verdict.path].tolist(), verdict.next_token]

    assert verify(LOGITS) == verify(LOGITS.masked_fill(LOGITS == 0.0, -torch.inf)) == [2, 0]
    for row, expected in ((0, None), (1, None), (2, [2, 0])):
        logits = LOGITS.clone()
        logits[row] = value
        if expected is None:
            with pytest.raises(NotFinite, match=f"logits in row {row} of 3 are not finite"):
                verify(logits)
        else:
            assert verify(logits) == expected


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_have_no_probabilities(value):
    assert warp(torch.full((2, 6), value), SAMPLED).isnan().all()


@pytest.mark.parametrize("rule", RULES)
def test_a_row_that_is_not_finite_accepts_nothing(rule):
    """Three tokens with acceptance probability 1/6 each. The row that verifies the last is not
    finite: if the first two are accepted, that row is needed, which is an error."""
    draft, logits = Proposal.chain(torch.tensor([3, 1, 4])), torch.zeros(4, 6)
    logits[2] = torch.nan
    verifier, lengths, errors = make_verifier(rule), [], 0
    for seed in range(600):
        try:
            verdict = verifier.verify(draft, logits, SAMPLED, sequence_randomness(seed, 0))
            lengths.append(len(verdict.path))
        except NotFinite:
            errors += 1
    assert max(lengths) <= 1
    assert 5 <= errors <= 32  # 600 / 36 = 16.7, within four standard deviations


def test_an_error_names_the_input_and_the_token():
    class Broken(ToyModel):
        def score(self, drafts, layers=()):
            outputs = super().score(drafts, layers)
            for (_, committed, _), output in zip(drafts, outputs, strict=True):
                if len(committed) > 2:
                    output.logits[:] = torch.nan
            return outputs

    decoder = decoder_of(Broken(3), ToyDrafter(2), 1)
    with pytest.raises(NotFinite, match=r"input \d, new token \d+: .*logits in row \d of "):
        decoder.decode_all([toy_source(), toy_source()], 6, 1)


@pytest.mark.parametrize("family", ["llama", "marian"])
def test_a_model_whose_finite_weights_give_no_numbers_is_refused_by_that(family):
    model = tiny_model(family).float()
    with torch.no_grad():
        model.lm_head.weight *= 1e38
    with pytest.raises(NotFinite, match=r"gives NaN or infinite logits in torch\.float32"):
        CachedModel(model)


def test_a_head_that_gives_no_number_is_an_error_and_not_the_end_of_a_draft():
    judge = HeadJudge(make_head(tiny_model("llama")))
    with pytest.raises(NotFinite, match="acceptance head .* gives NaN"):
        judge(DraftState(1, hidden=[torch.full((16,), torch.nan)]), 0.5)


DRAFTERS = {
    "spec-drafter": lambda: BlockDrafter(tiny_drafter("marian", slots="paper")),
    "linked": lambda: BlockDrafter(tiny_drafter("marian", previous_token_rank=3)),
    "causal": lambda: CausalDrafter(CachedModel(tiny_model("marian"))),
}


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("tree", [None, Optimal(4), eagle_tree(), Paths(2)], ids=str)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_drafter_whose_rows_are_no_numbers_is_named(kind, tree):
    drafter = DRAFTERS[kind]()
    model = drafter.model.model if kind == "causal" else drafter.model
    with torch.no_grad():  # finite, as weights that are read must be
        model.get_output_embeddings().weight.fill_(1e308)
    drafts = drafter if tree is None else TreeDrafter(drafter, tree, draft_temperature=1.0)
    decoder = decoder_of(ToyModel(0, VOCAB), drafts, 3, make_verifier("greedy"))
    name = re.escape(drafts.name)
    with pytest.raises(NotFinite, match=f"drafter '{name}': the drafter's logits are NaN"):
        decoder.decode_all([Source.of_text(torch.tensor([5, 9, 7]), torch.tensor([0]))], 6)
