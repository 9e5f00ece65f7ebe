"""A language model that fills in masks, in the loop: lossless by enumeration, greedy as plain."""

from __future__ import annotations

import pytest
import torch
from transformers import GPTJConfig, GPTJForCausalLM

from drafttrain.build.drafters import make_drafter
from drafttrain.decoding.drafters.cascade import Level, cascade
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.parallel import ParallelDrafter, probs_along
from drafttrain.decoding.drafters.tree import TreeDrafter
from drafttrain.decoding.engine.cached_model import CachedModel, make_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.sampling import SampledRandomness, warp
from drafttrain.decoding.shared import alone
from drafttrain.decoding.stopping import Confidence, Entropy, FixedLength
from drafttrain.decoding.trees.chosen import Optimal
from drafttrain.decoding.trees.drawn import Branching
from drafttrain.decoding.trees.verifiers import RecursiveRejection, TargetWalk
from drafttrain.decoding.types import Sampling
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling
from tests.comparing import close
from tests.decoding.enumeration import (
    alone_and_together,
    enumerate_output,
    replaced,
    total_variation,
)
from tests.decoding.toys import ToyTarget, autoregressive_law, toy_prompt, toys_together
from tests.tiny_drafters import noisy
from tests.tiny_models import tiny_model

MASK = 3
SAMPLINGS = {
    "temperature 1": Sampling(temperature=1.0),
    "top-k": Sampling(temperature=1.3, top_k=2),
    "top-p": Sampling(temperature=0.7, top_p=0.6),
}
PROMPT = [5, 9, 20, 7]
OUTPUT = torch.tensor([11, 30, 12, 8, 25, 1])


def parallel(family: str = "llama", k: int = 4, **changes: object) -> ParallelDrafter:
    """A drafter whose rows depend much on what stands before them."""
    model = tiny_model(family, seed=7, initializer_range=0.6, **changes)
    model.lm_head.weight.data.normal_()  # an end is as likely as any other token
    model.config.pard_token, model.config.k = MASK, k
    return make_drafter(model)


def toy_drafter() -> ParallelDrafter:
    return parallel(vocab_size=4, bos_token_id=2, eos_token_id=1)


@pytest.mark.parametrize(("sampling", "together"), alone_and_together(SAMPLINGS))
def test_sampling_through_masks_follows_the_target_exactly(sampling, together: int) -> None:
    target, stop = ToyTarget(vocabulary=4, seed=1), FixedLength(2)
    decoder = Decoder(target, toy_drafter(), stop, RejectionSampling(), sampling, replaced)
    law = enumerate_output(decoder, toys_together(toy_prompt, together), 3)
    expected = autoregressive_law(target, sampling, 3)
    assert total_variation(law, expected) < 1e-12
    assert max(abs(law[x] - expected[x]) for x in expected) < 1e-12


def test_sampled_trees_over_masks_follow_the_target_exactly() -> None:
    target, sampling = ToyTarget(vocabulary=4, seed=1), SAMPLINGS["top-k"]
    drafter = TreeDrafter(toy_drafter(), Branching([2, 1]))
    stop, verifier = FixedLength(2), RecursiveRejection
    decoder = Decoder(target, drafter, stop, verifier, sampling, replaced)
    law = enumerate_output(decoder, [toy_prompt()], 3)
    assert total_variation(law, autoregressive_law(target, sampling, 3)) < 1e-12


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_rows_are_those_of_the_context_and_masks_and_masks_leave_no_trace(family: str) -> None:
    drafter, sampling = parallel(family), Sampling(temperature=1.0)
    session = drafter.open(make_source(PROMPT, drafter.model.model), sampling, randomness())
    for output in ([], [11, 30], [11, 30, 3, 3], [11, 4], [11, 4, 3, 25]):
        tokens = torch.tensor([*PROMPT, *output])
        proposal = alone(session.propose(tokens, None, FixedLength(4)))
        with torch.no_grad():
            logits = drafter.model.model(torch.tensor([[*tokens, *[MASK] * 3]])).logits[0, -4:]
        close(proposal.draft_probs, warp(logits, sampling))
        assert session.own.state.tokens == tokens.tolist()
        assert proposal.passes == 1 and len(proposal.tokens) == 4


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLINGS["top-p"]], ids=["greedy", "sampled"])
def test_probabilities_along_an_output_are_those_of_each_draft(family, sampling) -> None:
    drafter = parallel(family, max_position_embeddings=len(PROMPT) + 7)
    source = make_source(PROMPT, drafter.model.model)
    output = greedy_block(drafter, source, 4) + [30, 12, 1]  # so that some drafts are right
    output = torch.tensor(output)
    found = probs_along(drafter, source, output, [4] * len(output), sampling)
    for place in range(len(output)):
        session = drafter.open(source, sampling, randomness())
        tokens = torch.cat([source.prefix, output[:place]])
        proposal = alone(session.propose(tokens, None, FixedLength(4)))
        assert len(proposal.tokens) == min(4, 8 - place)  # the last one needs no position
        expected = proposed_probs(proposal, output[place:])
        assert found[place].tolist() == pytest.approx(expected + [-1.0] * (4 - len(expected)))
    shorter = probs_along(drafter, source, output, [1] * len(output), sampling)
    assert shorter == pytest.approx(found[:, :1])
    assert (found > 0).sum() >= 4


def greedy_block(drafter: ParallelDrafter, source, k: int) -> list[int]:
    session = drafter.open(source, Sampling(), randomness())
    return alone(session.propose(source.prefix, None, FixedLength(k))).tokens.tolist()


def proposed_probs(proposal, output: torch.Tensor) -> list[float]:
    """How likely a draft has the output's own tokens; 0 behind its end."""
    count = len(proposal.tokens)
    inside = output[:count]
    if proposal.draft_probs is None:
        probs = (proposal.tokens[: len(inside)] == inside).double()
    else:
        probs = proposal.draft_probs[: len(inside)].gather(-1, inside[:, None])[:, 0]
    return probs.tolist() + [0.0] * (count - len(inside))


def test_an_output_longer_than_the_positions_is_drafted_for_as_far_as_they_go() -> None:
    drafter = parallel(max_position_embeddings=len(PROMPT) + 2)
    source = make_source(PROMPT, drafter.model.model)
    found = probs_along(drafter, source, OUTPUT, [3] * 6, Sampling())
    assert (found >= 0).sum(1).tolist() == [3, 2, 1, 0, 0, 0]


def decode(drafter: Drafter, batch: int = 1, sampling=Sampling(), verifier=None, k=4):  # noqa: B008
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    target = CachedModel(model)
    sources = [make_source(PROMPT[i:], model) for i in range(3)]
    verifier = verifier or GreedyMatch()
    decoder = Decoder(target, drafter, FixedLength(k), verifier, sampling, lambda _: randomness())
    return [output.tokens for output in decoder.decode_all(sources, 16, batch)]


def randomness() -> SampledRandomness:
    return SampledRandomness(torch.Generator().manual_seed(0))


def test_greedy_output_is_plain_output_in_batches_trees_and_cascades() -> None:
    plain = decode(NoDrafter())
    drafter = parallel()
    copy = noisy(tiny_model("llama"), "llama", 0.05)
    levels = [
        Level("causal", CausalDrafter(CachedModel(copy))),
        Level("parallel", drafter),
        Level("max-gram", MaxGramDrafter()),
    ]
    assert decode(drafter) == decode(drafter, batch=3) == plain
    assert decode(TreeDrafter(drafter, Optimal(6)), verifier=TargetWalk) == plain
    for matrix in ([[3, 2, 0], [3, 1], [0]], [[1, 4, 2], [0, 0], [0]]):
        assert decode(cascade(levels, matrix), k=sum(matrix[0])) == plain


def test_a_stop_policy_ends_a_block_before_the_row_that_it_looks_at() -> None:
    drafter = parallel()
    source = make_source(PROMPT, drafter.model.model)

    def drafted(stop) -> int:
        session = drafter.open(source, Sampling(), randomness())
        return len(alone(session.propose(source.prefix, None, stop)).tokens)

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


def test_a_family_whose_positions_are_not_known_drafts_the_same_rows() -> None:
    torch.manual_seed(0)
    model = GPTJForCausalLM(GPTJConfig(vocab_size=40, n_embd=16, n_layer=2, n_head=2, rotary_dim=4))
    model = model.double().eval()
    model.config.pard_token, model.config.k = MASK, 3
    drafter = make_drafter(model)
    source = make_source(PROMPT, model)
    session = drafter.open(source, Sampling(temperature=1.0), randomness())
    for output in ([], [11, 30, 3], [11, 4]):
        tokens = torch.tensor([*PROMPT, *output])
        probs = alone(session.propose(tokens, None, FixedLength(3))).draft_probs
        with torch.no_grad():
            close(probs, model(torch.tensor([[*tokens, MASK, MASK]])).logits[0, -3:].softmax(-1))
    with pytest.raises(ValueError, match="'gptj'"):
        probs_along(drafter, source, OUTPUT, [3] * 6, Sampling())
