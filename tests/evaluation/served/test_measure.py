"""What is expected in servers, from tiny models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drafttrain.decoding.drafters.along import at_every_prefix
from drafttrain.decoding.drafters.causal import CausalDrafter, rows_along
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Sampling
from drafttrain.decoding.verifiers import GreedyMatch
from drafttrain.evaluation.bootstrap import draw_resamples
from drafttrain.evaluation.metrics import accepted_tokens
from drafttrain.evaluation.served.measure import judge_along, served_runs
from drafttrain.evaluation.stops.chain_trace import TraceOptions
from tests.tiny_models import near_copy, tiny_model

LENGTH = 16


def outputs_of(model: CachedModel, sources, drafter=None, k=1):
    decoder = Decoder(
        model,
        drafter or NoDrafter(),
        FixedLength(k),
        GreedyMatch(),
        Sampling(),
        lambda _: SampledRandomness(torch.Generator().manual_seed(0)),
    )
    return decoder.decode_all(sources, LENGTH)


def pair_and_sources(family: str):
    target = tiny_model(family)
    drafter = near_copy(target, 0.05, seed=2)
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(4, 40, (4, 5), generator=generator).tolist()
    return CachedModel(target), CachedModel(drafter), [make_source(ids, target) for ids in texts]


def test_probabilities_along_an_output_are_those_that_follow_each_prefix():
    whole = at_every_prefix(torch.tensor([0.5, 0.75, 0.25, 1.0]), 4, 3)
    assert whole.tolist() == [[0.5, 0.75, 0.25], [0.75, 0.25, 1.0], [0.25, 1.0, 0.0], [1.0, 0, 0]]
    cut = at_every_prefix(torch.tensor([0.5, 0.75]), 4, 2, start=1)
    assert cut.tolist() == [[-1.0, 0.5], [0.5, 0.75], [0.75, -1.0], [-1.0, 0.0]]


@pytest.mark.parametrize("k", [2, 4])
def test_greedy_rounds_behind_the_first_token_are_those_of_decoding(k):
    target, drafter, sources = pair_and_sources("llama")
    plain = outputs_of(target, sources)
    kept = [place for place, output in enumerate(plain) if len(output.tokens) > 1]
    sources, plain = [sources[place] for place in kept], [plain[place] for place in kept]
    assert len(plain) > 1
    # engines draft from the second token on: decode from prompts that hold the first one too
    longer = [
        make_source([*source.input_ids.tolist(), output.tokens[0]], target.model)
        for source, output in zip(sources, plain, strict=True)
    ]
    options = TraceOptions(Sampling(), LENGTH, k)
    along = [
        judge_along(target, drafter, source, output.tokens, options)
        for source, output in zip(sources, plain, strict=True)
    ]
    [run] = served_runs("causal", along, [k], (), draw_resamples(len(along), 10))
    decoder = Decoder(
        target,
        CausalDrafter(drafter),
        FixedLength(k),
        GreedyMatch(),
        Sampling(),
        lambda _: SampledRandomness(torch.Generator()),
    )
    rounds = [r for o in decoder.decode_all(longer, LENGTH - 1) for r in o.rounds]
    drafts = [r for r in rounds if len(r.drafted)]
    accepted = sum(map(accepted_tokens, rounds))
    assert run.rule == "greedy" and run.totals["num_drafts"] == len(drafts)
    assert run.totals["num_accepted_tokens"] == accepted
    length = run.metrics["mean_acceptance_length"].value
    assert length == pytest.approx(1 + accepted / len(drafts), abs=1e-12)
    at_first = sum(accepted_tokens(r) >= 1 for r in rounds) / len(drafts)
    assert run.per_position_acceptance_rates[0].value == pytest.approx(at_first, abs=1e-12)
    above_one = sum(rate.value for rate in run.per_position_acceptance_rates)
    assert above_one == pytest.approx(length - 1, abs=1e-12)
    assert f"--spec-draft-n-max {k} " in run.synthetic["llama.cpp"]


def test_four_rules_at_every_length_and_p_min_in_sampling():
    target, drafter, sources = pair_and_sources("llama")
    options = TraceOptions(Sampling(1.0), LENGTH, 4)
    along = [judge_along(target, drafter, s, range(4, 12), options) for s in sources]
    runs = served_runs("causal", along, [4, 2], (0.3,), draw_resamples(len(along), 10))
    assert [(run.rule, run.k, run.p_min) for run in runs][:5] == [
        ("greedy", 2, 0.0),
        ("greedy", 2, 0.3),
        ("greedy", 4, 0.0),
        ("greedy", 4, 0.3),
        ("rejection", 2, 0.0),
    ]
    assert len(runs) == 2 * (2 + 1 + 2 + 1)  # p-min is llama.cpp's: greedy and one-hot drafts
    for run in runs:
        assert ("draft_acceptance_rate" in run.metrics) == (run.p_min == 0.0)
        assert bool(run.synthetic) == (run.p_min == 0.0)
    alone = {run.rule: run.metrics["token_acceptance_rate"].value for run in runs}
    assert alone["rejection"] >= max(alone["one-hot"], alone["own-sample"])


def test_rows_end_where_the_drafters_positions_do():
    target = tiny_model("gpt2")
    drafter = CachedModel(near_copy(target, 0.05, seed=2))
    source = make_source([5, 6, 7], target)
    whole = rows_along(drafter, source, torch.arange(4, 14))
    drafter.position_limit = 8
    cut = rows_along(drafter, source, torch.arange(4, 14))
    assert len(whole) == 10 and len(cut) == 6  # behind 3 to 8 tokens
    assert torch.allclose(whole[:6], cut, atol=1e-5)
    along = judge_along(
        CachedModel(target), drafter, source, range(4, 14), TraceOptions(Sampling(), 10, 4)
    )
    assert np.flatnonzero(along.limit > 0).tolist() == [0, 1, 2, 3, 4, 5]
    assert len(along.coins["greedy"]) == 10
