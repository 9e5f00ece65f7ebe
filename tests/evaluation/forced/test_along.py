"""Along the target's outputs methods do what decoding does: the same greedily, in law sampled."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from drafttrain.build.drafters import make_drafter
from drafttrain.build.method import Method
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Output, Sampling, Source
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling, make_verifier
from drafttrain.evaluation.forced import along
from drafttrain.evaluation.forced.along import OwnOutput, follow, follow_outputs
from drafttrain.evaluation.forced.evaluate import expected_counts
from drafttrain.evaluation.forced.rounds import Expected
from drafttrain.evaluation.metrics import Counts, count_positions, count_rounds
from drafttrain.evaluation.options import EvaluationOptions
from drafttrain.evaluation.prompts import Prompt
from drafttrain.evaluation.served.measure import judge_along
from drafttrain.evaluation.stops.chain_trace import TraceOptions, judge
from tests.decoding.drafters.toy_blocks import toy_drafter
from tests.decoding.enumeration import enumerate_law
from tests.decoding.toys import ToyTarget, toy_prompt, toy_source
from tests.tiny_drafters import behind_prompts, shared, tiny_drafter
from tests.tiny_models import near_copy, tiny_model

SAMPLED = Sampling(1.0, top_k=2)
MASK = 3
LENGTH = 14
FACTS = ("tokens", "rounds", "accepted", "drafted", "passes")


def masked(**changes: object):
    """A language model that drafts blocks through masks."""
    model = tiny_model("llama", seed=7, initializer_range=0.6, **changes)
    model.lm_head.weight.data.normal_()
    model.config.pard_token, model.config.k = MASK, 4
    return make_drafter(model)


def small(seed: int = 7) -> CausalDrafter:
    ids = {"vocab_size": 4, "bos_token_id": 2, "eos_token_id": 1}
    return make_drafter(tiny_model("llama", seed=seed, initializer_range=0.6, **ids))


TOYS = {
    "causal": (small, toy_prompt),
    "parallel": (lambda: masked(vocab_size=4, bos_token_id=2, eos_token_id=1), toy_prompt),
    "max-gram": (lambda: MaxGramDrafter([2, 3, 2, 3]), toy_prompt),
    "blocks": (lambda: toy_drafter(slots="anchored"), toy_source),
    "coupled blocks": (lambda: toy_drafter(slots="paper", previous_token_rank=3), toy_source),
}


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("kind", TOYS)
def test_expected_rounds_are_the_mean_of_those_that_decoding_plays(kind, rule):
    """Every output and every round of speculative sampling, with its probability."""
    if kind == "max-gram" and rule == "block":
        rule = "rejection"
    drafter, source = TOYS[kind][0](), TOYS[kind][1]()
    target, most, k = ToyTarget(vocabulary=4, seed=1), 4, 3
    method = Method(drafter, FixedLength(k), make_verifier(rule))
    played = {name: np.zeros(k) for name in ("drafted", "accepted", "reached")}
    rounds = 0.0
    for output, share in decoded_law(target, method, source, most).items():
        counts = count_positions([Output(tokens=[], rounds=list(output))])
        for name, summed in played.items():
            own = getattr(counts, name)[0]
            summed[: len(own)] += share * own
        rounds += share * len(output)
    found: dict[str, Tensor | float] = defaultdict(float)
    plain = Method(NoDrafter(), FixedLength(1), RejectionSampling())
    for output, share in decoded_law(target, plain, source, most).items():
        tokens = [token for one in output for token in one.emitted]
        one = followed(target, method, source, tokens, most)
        found["rounds"] += share * one.num_steps
        found["drafted"] += share * one.num_drafted_per_pos
        found["accepted"] += share * one.num_accepted_tokens_per_pos
        found["reached"] += share * one.num_reached_per_pos
    assert found["rounds"] == pytest.approx(rounds, abs=1e-6)
    assert found["accepted"] == pytest.approx(played["accepted"], abs=1e-6)
    assert found["reached"] == pytest.approx(played["reached"], abs=1e-6)
    if kind == "causal":  # drafts that end by EOS behind a wrong token are not seen
        assert (found["drafted"] >= played["drafted"] - 1e-6).all()
    else:
        assert found["drafted"] == pytest.approx(played["drafted"], abs=1e-6)
    assert 0.05 < played["accepted"].sum() < 2.9, "the pair is too simple to show anything"


def decoded_law(target, method: Method, source: Source, most: int) -> dict[tuple, float]:
    """The rounds of decoding, with their probabilities."""

    def decode(randomness) -> tuple:
        decoder = Decoder(
            target, method.drafter, method.stop, method.verifier, SAMPLED, lambda _: randomness
        )
        return tuple(Facts(one) for one in decoder.decode_all([source], most)[0].rounds)

    return enumerate_law(decode)


class Facts:
    """What is counted of a round, comparable."""

    def __init__(self, played) -> None:
        self.drafted, self.path = tuple(played.drafted), tuple(played.path)
        self.emitted, self.levels, self.depth = tuple(played.emitted), played.levels, None

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.drafted, self.path, self.emitted))


def followed(target, method: Method, source: Source, tokens: list[int], most: int) -> Expected:
    tracing, output = TraceOptions(SAMPLED, most, depth=0), torch.tensor(tokens)
    rows = judge(target, source, output, tracing)
    limit = most - 1 - np.arange(len(tokens))
    [found] = follow([method], OwnOutput(source, output, rows, limit), tracing)
    return found


def pairs(kind: str):
    """A target and a drafter that is right now and then."""
    if kind == "spec-drafter":
        target, drafter = shared("marian"), tiny_drafter(decoder_layers=2, slots="anchored")
        torch.manual_seed(0)
        for parameter in drafter.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
        return target, make_drafter(drafter)
    target = tiny_model("t5" if kind == "t5" else "llama", num_hidden_layers=4)
    if kind == "behind prompts":
        return target, make_drafter(behind_prompts(target, [2, 3]), target)
    if kind == "parallel":
        return target, masked()
    if kind == "max-gram":
        return target, MaxGramDrafter()
    return target, CausalDrafter(CachedModel(near_copy(target, 0.05, seed=2)))


KINDS = ("llama", "t5", "spec-drafter", "parallel", "max-gram", "behind prompts")


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_rounds_along_outputs_are_those_of_decoding(kind):
    model, drafter = pairs(kind)
    target = CachedModel(model)
    methods = [Method(drafter, FixedLength(k), GreedyMatch()) for k in (2, 4)]
    prompts = prompts_of(model)
    options = EvaluationOptions(max_new_tokens=LENGTH)
    found = follow_outputs(target, methods, prompts, options)
    accepted = 0
    for method, rounds in zip(methods, found.rounds, strict=True):
        decoded = decode(target, method, prompts, options)
        assert found.lengths.tolist() == [len(output.tokens) for output in decoded]
        ours, theirs = expected_counts(method, rounds), count_rounds(decoded)
        by_position = count_positions(decoded)
        for name in FACTS:
            assert_equal(kind, name, ours, theirs)
        width = by_position.accepted.shape[1]
        reached = np.stack([one.num_reached_per_pos for one in rounds])[:, :width]
        assert reached.tolist() == by_position.reached.tolist()
        accepted += int(ours.accepted.sum())
    assert accepted > 0 or kind == "parallel"


def assert_equal(kind: str, name: str, ours: Counts, theirs: Counts) -> None:
    own, other = getattr(ours, name), getattr(theirs, name)
    if name in ("drafted", "passes") and kind in ("llama", "t5", "behind prompts"):
        assert (own >= other).all()  # drafts that end by EOS behind a wrong token are not seen
    else:
        assert own.tolist() == other.tolist(), name


def prompts_of(model) -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(4, 40, (4, 5), generator=generator).tolist()
    return [Prompt(row, "", None, make_source(ids, model)) for row, ids in enumerate(texts)]


def decode(target, method: Method, prompts, options: EvaluationOptions) -> list[Output]:
    decoder = Decoder(
        target,
        method.drafter,
        method.stop,
        method.verifier,
        options.sampling,
        lambda place: sequence_randomness(options.seed, prompts[place].row),
    )
    return decoder.decode_all([one.source for one in prompts], options.max_new_tokens)


def test_the_target_decodes_and_reads_each_prompt_once_however_many_follow(monkeypatch):
    model, drafter = pairs("llama")
    target, prompts = CachedModel(model), prompts_of(model)
    calls = 0
    score = target.score

    def counted(*arguments, **named):
        nonlocal calls
        calls += 1
        return score(*arguments, **named)

    monkeypatch.setattr(target, "score", counted)
    options = EvaluationOptions(sampling=Sampling(1.0), max_new_tokens=LENGTH)
    seen = []
    for drafters in ([drafter], [drafter, MaxGramDrafter(), masked()]):
        calls = 0
        methods = [
            Method(one, FixedLength(k), RejectionSampling()) for one in drafters for k in (2, 3)
        ]
        found = follow_outputs(target, methods, prompts, options)
        assert calls == found.lengths.max() + len(prompts)  # all are decoded together
        seen.append(found)
    alone, together = seen
    for own, other in zip(alone.rounds, together.rounds, strict=False):
        assert [one.num_steps for one in own] == pytest.approx([one.num_steps for one in other])


def test_how_many_outputs_are_decoded_together_changes_none(monkeypatch):
    model, drafter = pairs("llama")
    target, prompts = CachedModel(model), prompts_of(model)
    method = Method(drafter, FixedLength(3), RejectionSampling())
    options = EvaluationOptions(sampling=Sampling(1.0), max_new_tokens=LENGTH)
    found = []
    for together in (1, 3, 16):
        monkeypatch.setattr(along, "TOGETHER", together)
        found.append(follow_outputs(target, [method], prompts, options))
    alone, *others = found
    assert len(set(alone.lengths)) > 1 and len(prompts) > 3
    for one in others:
        assert one.lengths.tolist() == alone.lengths.tolist()
        steps = [round_.num_steps for round_ in one.rounds[0]]
        assert steps == pytest.approx([round_.num_steps for round_ in alone.rounds[0]])


def test_rules_of_engines_are_followed_once_for_a_drafter_and_only_where_asked_for(monkeypatch):
    model, drafter = pairs("llama")
    target, prompts = CachedModel(model), prompts_of(model)
    method = Method(drafter, FixedLength(2), GreedyMatch(), assistant=drafter.model.model)
    methods = [method, replace(method, stop=FixedLength(3), other="longer")]
    options = EvaluationOptions(max_new_tokens=LENGTH)
    judged = []

    def counted(*given):
        judged.append(given)
        return judge_along(*given)

    monkeypatch.setattr(along, "judge_along", counted)
    found = follow_outputs(target, methods, prompts, options)
    assert len(judged) == len(prompts)
    assert list(found.judged) == [drafter.name, "longer"]
    assert found.judged["longer"] is found.judged[drafter.name]
    judged.clear()
    without = follow_outputs(target, methods, prompts, options, served=False)
    assert not judged and not without.judged
    for own, other in zip(found.rounds, without.rounds, strict=True):
        assert [one.num_steps for one in own] == [one.num_steps for one in other]


def test_a_drafter_that_is_the_target_loses_nothing(monkeypatch):
    model: Drafter = tiny_model("llama")
    target, prompts = CachedModel(model), prompts_of(model)
    same = Method(CausalDrafter(CachedModel(model)), FixedLength(3), RejectionSampling())
    options = EvaluationOptions(sampling=Sampling(0.8), max_new_tokens=LENGTH)
    found = follow_outputs(target, [same], prompts, options)
    least = -(-found.lengths // 4)
    assert [one.num_steps for one in found.rounds[0]] == pytest.approx(least, abs=1e-3)
