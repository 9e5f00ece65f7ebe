"""Drafters whose prompt the target reads: its keys and values, lossless, greedy as plain."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from drafttrain.build.drafters import make_drafter
from drafttrain.decoding.drafters import causal, slots
from drafttrain.decoding.drafters.cascade import Level, cascade
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.tree import TreeDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.shared import alone
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.trees.chosen import Optimal
from drafttrain.decoding.trees.verifiers import TargetWalk
from drafttrain.decoding.types import Output, Sampling
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling
from tests.decoding.enumeration import enumerate_output, replaced, total_variation
from tests.decoding.test_batch_exactness import law_of_model
from tests.tiny_drafters import behind_prompts
from tests.tiny_models import tiny_model

FAMILIES = ("llama", "qwen3", "gpt2", "gpt-neox", "opt")
K = 4
PROMPTS = ([5, 9, 20, 7], [9, 20, 7, 30, 11, 6], [20, 7], [8, 15, 33], [21])
OUTPUT = [11, 30, 12, 8, 25, 1]


def tiny_target(family: str = "llama", **changes: object) -> PreTrainedModel:
    return tiny_model(family, num_hidden_layers=4, **changes)


def decode(
    target: PreTrainedModel,
    drafter: Drafter,
    batch: int = 1,
    verifier: object = None,
    k: int = K,
    new: int = 14,
) -> list[Output]:
    target.generation_config.eos_token_id = None
    model = CachedModel(target)
    verifier = verifier or GreedyMatch()
    decoder = Decoder(model, drafter, FixedLength(k), verifier, Sampling(), lambda _: randomness())
    return decoder.decode_all([make_source(ids, target) for ids in PROMPTS], new, batch)


def randomness() -> SampledRandomness:
    return SampledRandomness(torch.Generator().manual_seed(0))


def tokens_of(outputs: list[Output]) -> list[list[int]]:
    return [one.tokens for one in outputs]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", [None, K], ids=["token by token", "blocks"])
def test_with_all_layers_it_drafts_what_the_target_says(family: str, k: int | None) -> None:
    target = tiny_target(family)
    drafter = make_drafter(behind_prompts(target, range(4), k, noise=0.0), target)
    for output in decode(target, drafter, batch=2):
        first, *others = output.rounds
        assert list(first.drafted) == []  # the target has not read the prompt yet
        for played in others:
            certain = played.drafted[:1] if k else played.drafted
            assert list(certain) == list(played.emitted[: len(certain)])
        assert sum(len(played.drafted) for played in others) > 3


@pytest.mark.parametrize("k", [None, K], ids=["token by token", "blocks"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_greedy_output_is_plain_output_in_batches_trees_and_cascades(
    family: str, k: int | None
) -> None:
    target = tiny_target(family)
    plain = tokens_of(decode(target, NoDrafter()))
    drafter = make_drafter(behind_prompts(target, [2, 3], k), target)
    one, three = decode(target, drafter), decode(target, drafter, batch=3)
    assert tokens_of(one) == tokens_of(three) == plain
    drafts = [[list(played.drafted) for played in output.rounds] for output in one]
    assert drafts == [[list(played.drafted) for played in output.rounds] for output in three]
    assert sum(len(output.rounds) for output in one) < sum(map(len, plain))
    tree = TreeDrafter(drafter, Optimal(6))
    assert tokens_of(decode(target, tree, 3, TargetWalk)) == plain
    levels = [Level("behind", drafter), Level("max-gram", MaxGramDrafter())]
    assert tokens_of(decode(target, cascade(levels, [[2, 2], [0]], 1.0), 3)) == plain


@pytest.mark.parametrize("k", [None, 2], ids=["token by token", "blocks"])
def test_sampling_follows_the_target_exactly(k: int | None) -> None:
    """The second of three sequences, two at once; four tokens hold a whole draft of two."""
    target, sampling = tiny_target(vocab_size=4, bos_token_id=2), Sampling(1.3, top_k=2)
    drafter = make_drafter(behind_prompts(target, [1, 3], k, noise=0.3), target)
    stop, verifier = FixedLength(2), RejectionSampling()
    decoder = Decoder(CachedModel(target), drafter, stop, verifier, sampling, replaced)
    sources = [make_source(ids, target) for ids in ([3], [2, 3, 2], [3, 3])]
    law = enumerate_output(decoder, sources, 4, place=1, batch_size=2)
    assert total_variation(law, law_of_model(target, sources[1], sampling, 4)) < 1e-12


def target_state(target: PreTrainedModel, prompt: list[int], layers: tuple[int, ...]):
    read = CachedModel(target).read(
        make_source(prompt, target), make_drafter(behind_prompts(target, layers)).requires
    )
    return TargetState(len(prompt) + 1, prompt=read.prompt)


@pytest.mark.parametrize("k", [None, K], ids=["token by token", "blocks"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "sampled"])
def test_probabilities_along_an_output_are_those_of_each_draft(k, sampling) -> None:
    target = tiny_target()
    model = behind_prompts(target, [2, 3], k)
    drafter, cached = make_drafter(model, target), CachedModel(target)
    along = slots.probs_along if k else causal.probs_along
    source = cached.read(make_source(PROMPTS[1], target), drafter.requires)
    output = torch.tensor(OUTPUT)
    found = along(drafter, source, output, [K] * len(OUTPUT), sampling)
    assert found.shape == (len(OUTPUT), K) and found[0, 0] == -1
    state = target_state(target, PROMPTS[1], (2, 3))

    def drafted(place: int, count: int) -> list[float]:
        """How likely a draft behind so many tokens has the output's own."""
        session = drafter.open(make_source(PROMPTS[1], target), sampling, randomness())
        tokens = torch.cat([torch.tensor(PROMPTS[1]), output[:place]])
        proposal = alone(session.propose(tokens, state, FixedLength(count)))
        own = output[place : place + count]
        if proposal.draft_probs is None:
            return (proposal.tokens[: len(own)] == own).double().tolist()
        return proposal.draft_probs[: len(own)].gather(-1, own[:, None])[:, 0].tolist()

    for place in range(1, len(OUTPUT)):
        inside = range(place, min(place + K, len(OUTPUT)))
        expected = drafted(place, K) if k else [drafted(one, 1)[0] for one in inside]
        expected += [0.0] * (K - len(expected))
        assert found[place].tolist() == pytest.approx(expected, abs=1e-6)
    nothing = along(drafter, source, output[:1], [K], sampling)
    assert nothing[0, 0] == -1


def test_a_prompt_that_the_target_has_not_read_is_refused() -> None:
    target = tiny_target()
    drafter = make_drafter(behind_prompts(target, [0, 3], K), target)
    source = make_source(PROMPTS[0], target)
    with pytest.raises(ValueError, match=r"has not been read by the target.*\[0, 3\]"):
        drafter.model.encode(source)
    session = drafter.open(source, Sampling(), randomness())
    assert len(alone(session.propose(source.prefix, None, FixedLength(K))).tokens) == 0
