"""A language model that fills masks: its rows, and where its drafts end."""

import pytest
import torch

from drafttrain.decoding.batching import run_single
from drafttrain.decoding.drafters.parallel import ParallelDrafter
from drafttrain.decoding.drafters.teacher_forced import read_outputs, teacher_forced_probs
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.stopping import Confidence, Entropy, FixedLength
from drafttrain.decoding.types import Sampling
from tests.comparing import close
from tests.decoding.decoded import drawn, propose
from tests.decoding.expected import expected_probs
from tests.tiny_drafters import MASK, parallel

PROMPT = [5, 9, 20, 7]
OUTPUT = torch.tensor([30, 12, 1, 8, 25, 11])


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_rows_are_those_of_the_context_and_masks_and_masks_leave_no_trace(family):
    drafter = parallel(family)
    sampling = Sampling(temperature=1.0)
    session = drafter.open(make_source(PROMPT, drafter.model.model), sampling, drawn())
    for output in ([], [11, 30], [11, 30, 3, 3], [11, 4], [11, 4, 3, 25]):
        tokens = torch.tensor([*PROMPT, *output])
        proposal = run_single(session.propose(tokens, None, FixedLength(4)))
        with torch.no_grad():
            ids = torch.tensor([[*tokens.tolist(), *[MASK] * 3]])
            fresh = drafter.model.model(ids)
        close(proposal.draft_probs, expected_probs(fresh.logits[0, -4:], sampling))
        assert session.sequence.state.tokens == tokens.tolist()
        assert proposal.passes == 1 and len(proposal.tokens) == 4


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.7, top_p=0.6)], ids=["greedy", "sampled"]
)
def test_probabilities_along_an_output_are_those_of_each_draft(family, sampling):
    prompt = [*PROMPT, *PROMPT]
    drafter = parallel(family, max_position_embeddings=len(prompt) + 7)
    source = make_source(prompt, drafter.model.model)
    output = torch.cat([propose(drafter, source).tokens, OUTPUT[:3]])  # some drafts are right
    found = along(drafter, source, output, 4, sampling)
    for place in range(len(output)):
        proposal = propose(drafter, source, torch.cat([source.prefix, output[:place]]), 4, sampling)
        assert len(proposal.tokens) == min(4, 8 - place)  # the last token needs no position
        expected = proposed_probs(proposal, output[place:])
        expected += [-1.0] * (4 - len(expected))
        assert found[place].tolist() == pytest.approx(expected, abs=1e-6)
    shorter = along(drafter, source, output, 1, sampling)
    assert shorter == pytest.approx(found[:, :1], abs=1e-6)
    assert (found > 0).sum() >= 4


def along(drafter: ParallelDrafter, source, output, k: int, sampling: Sampling) -> torch.Tensor:
    [known] = read_outputs(drafter.model, [source], [output], drafter.requires)
    return run_single(teacher_forced_probs(drafter, known, [k] * len(output), sampling))


def proposed_probs(proposal, output: torch.Tensor) -> list[float]:
    """Returns the draft probabilities of the output's tokens; 0 after the end of the draft."""
    count = len(proposal.tokens)
    inside = output[:count]
    if proposal.draft_probs is None:
        probs = (proposal.tokens[: len(inside)] == inside).double()
    else:
        probs = proposal.draft_probs[: len(inside)].gather(-1, inside[:, None])[:, 0]
    return probs.tolist() + [0.0] * (count - len(inside))


def test_an_output_longer_than_the_positions_is_drafted_for_as_far_as_they_go():
    drafter = parallel(max_position_embeddings=len(PROMPT) + 2)
    source = make_source(PROMPT, drafter.model.model)
    found = along(drafter, source, OUTPUT, 3, Sampling())
    assert (found >= 0).sum(1).tolist() == [3, 2, 1, 0, 0, 0]


def test_a_stop_policy_ends_a_block_before_the_row_that_it_looks_at():
    drafter = parallel()
    source = make_source(PROMPT, drafter.model.model)

    def drafted(stop) -> int:
        return len(propose(drafter, source, stop=stop).tokens)

    with torch.no_grad():
        logits = drafter.model.model(torch.tensor([[*PROMPT, *[MASK] * 3]])).logits[0, -4:]
    probs = logits.softmax(-1)
    entropies = -(probs * probs.log()).sum(-1)
    bound = float(entropies[1:].max()) - 1e-6
    assert drafted(Entropy(bound, 4)) == int((entropies > bound).nonzero()[0])
    assert drafted(Entropy(100.0, 4)) == 4 and drafted(FixedLength(2)) == 2
    least = float(probs.max(-1).values[1:].min()) + 1e-6
    assert drafted(Confidence(least, 4)) == int((probs.max(-1).values < least).nonzero()[0])
    assert drafted(Confidence(0.0, 4)) == 4
