"""Teacher-forced acceptance: greedy counts equal those of decoding, sampled ones hand-computed."""

import datasets
import numpy as np
import pytest
import torch

from drafttrain.build.method import Method
from drafttrain.build.pairs import make_drafter
from drafttrain.config.decode import SamplingConfig
from drafttrain.data.batches.block_rows import BlockRowsCollator
from drafttrain.data.batches.examples import Examples
from drafttrain.decoding.drafters.causal import CausalDrafter, greedy_blocks
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.teacher_forced import KnownOutput
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Sampling
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling
from drafttrain.evaluation import teacher_forced
from drafttrain.evaluation.calibration import round_starts
from drafttrain.evaluation.metrics import count_positions, count_rounds
from drafttrain.evaluation.prompts import Prompt
from drafttrain.evaluation.runner import decode_by
from drafttrain.evaluation.teacher_forced import (
    NOT_DRAFTED,
    BlockDrafts,
    BlockValidation,
    TargetOutput,
    accepted_runs,
    count_accepted,
    measure_forced,
    measure_overlaps,
)
from drafttrain.training.objectives.predict_ahead import PredictAhead
from tests.decoding.drafts import ScriptedDrafter, noisy_blocks
from tests.evaluation.scripted import chain, plain_tokens
from tests.tiny_drafters import block_heads, parallel, shared, tiny_drafter, with_noise
from tests.tiny_models import near_copy, tiny_model

EOS = 1


@pytest.mark.parametrize("seed", range(4))
def test_validation_counts_the_rounds_of_decoding(tiny_marian, seed):
    """A block may end early: -1 stands for no token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 40, (6,), generator=generator).tolist()
    tokens = plain_tokens(tiny_marian, ids, 30)
    blocks = noisy_blocks(tokens, k=4, wrong=0.3, seed=seed)
    blocks[3, 2:] = blocks[len(tokens) // 2] = -1
    method = Method(ScriptedDrafter({tuple(ids): blocks}), FixedLength(4), GreedyMatch())
    prompt = Prompt(0, "", None, make_source(ids, tiny_marian))
    sampling = SamplingConfig(max_new_tokens=30)
    [decoded] = decode_by(CachedModel(tiny_marian), method, sampling, [prompt])
    assert tokens == decoded.tokens
    starts = round_starts(accepted_runs(blocks, tokens))
    emitted = [len(round.emitted) for round in decoded.rounds]
    assert emitted == np.diff([*starts, len(tokens)]).tolist()


def test_held_out_outputs_of_single_tokens_have_no_loss(tiny_marian):
    rows = Examples(datasets.Dataset.from_list([{"source_ids": [5, EOS], "target_ids": [EOS]}]))
    nothing = BlockDrafts(torch.full((1, 3), -1))
    validate = BlockValidation(rows, BlockRowsCollator(3, 4, seed=0), lambda *_: nothing)
    assert validate(PredictAhead(block_heads(), tiny_marian)) == {"mean_acceptance_length": 1.0}


def test_drafts_along_an_output_are_the_rows_that_follow_each_prefix():
    best = torch.tensor([7, 8, 9, 3])
    assert greedy_blocks(best, 4, 3).tolist() == [[7, 8, 9], [8, 9, 3], [9, 3, -1], [3, -1, -1]]
    assert greedy_blocks(best[:2], 3, 2).tolist() == [[7, 8], [8, -1], [-1, -1]]


def pairs(kind: str):
    """Returns a target and a drafter that is sometimes right."""
    if kind == "spec-drafter":
        drafter = with_noise(tiny_drafter(decoder_layers=2, previous_token_rank=3))
        return shared("marian"), make_drafter(drafter)
    target = tiny_model("t5" if kind == "t5" else "llama", num_hidden_layers=4)
    if kind == "parallel":
        return target, parallel()
    if kind == "max-gram":
        return target, MaxGramDrafter()
    return target, CausalDrafter(CachedModel(near_copy(target, 0.05, seed=2)))


def prompts_of(model) -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(4, 40, (4, 5), generator=generator).tolist()
    return [Prompt(row, "", None, make_source(ids, model)) for row, ids in enumerate(texts)]


@pytest.mark.parametrize("kind", ["llama", "t5", "spec-drafter", "parallel", "max-gram"])
def test_greedy_counts_are_those_of_decoding(kind):
    model, drafter = pairs(kind)
    target, prompts = CachedModel(model), prompts_of(model)
    methods = [Method(drafter, FixedLength(k), GreedyMatch()) for k in (2, 4)]
    sampling = SamplingConfig(max_new_tokens=14)
    plain, *forced = measure_forced(target, methods, prompts, sampling)
    equal = {"tokens", "rounds", "accepted"}  # drafts may end by EOS after a wrong token
    equal |= {"spec-drafter": {"passes"}, "parallel": {"passes"}}.get(kind, set())
    equal |= {"drafted", "passes"} if kind == "max-gram" else set()
    for method, found in zip(methods, forced, strict=True):
        decoded = decode_by(target, method, sampling, prompts)
        counts, positions = count_rounds(decoded), count_positions(decoded)
        assert plain.counts.tokens.tolist() == counts.tokens.tolist()
        for name in ("tokens", "rounds", "accepted", "drafted", "passes"):
            ours, theirs = getattr(found.counts, name), getattr(counts, name)
            assert (ours >= theirs).all() and (name not in equal or (ours == theirs).all()), name
        width = positions.shape[2]  # accepted and reached
        assert found.positions[1:, :, :width].tolist() == positions[1:].tolist()


def test_methods_that_share_a_pass_count_as_alone():
    model, drafter = pairs("llama")
    target, prompts = CachedModel(model), prompts_of(model)
    methods = [
        Method(one, FixedLength(k), RejectionSampling())
        for one in (drafter, MaxGramDrafter())
        for k in (2, 3)
    ]
    sampling = SamplingConfig(temperature=1.0, max_new_tokens=14)
    _, *together = measure_forced(target, methods, prompts, sampling)
    for method, found in zip(methods, together, strict=True):
        _, alone = measure_forced(target, [method], prompts, sampling)
        assert found.counts.tokens.tolist() == pytest.approx(alone.counts.tokens.tolist())
        assert found.counts.rounds.tolist() == alone.counts.rounds.tolist()


def test_a_drafter_that_is_the_target_is_always_accepted():
    model = tiny_model("llama")
    target, prompts = CachedModel(model), prompts_of(model)
    same = chain(model, verifier=RejectionSampling())
    sampling = SamplingConfig(temperature=0.8, max_new_tokens=14)
    _, found = measure_forced(target, [same], prompts, sampling)
    assert found.positions[1] == pytest.approx(found.positions[2])
    overlap = found.overlaps["sampled_acceptance"]
    assert overlap.numerators == pytest.approx(overlap.denominators)


def test_expected_counts_by_hand():
    """Tokens 0, 1, 1 with target probabilities 0.5, 0.4, 0.8; drafts of 2; at most 4 new tokens."""
    target_probs = torch.tensor([[0.5, 0.5], [0.6, 0.4], [0.2, 0.8]])
    output = TargetOutput(KnownOutput(None, torch.tensor([0, 1, 1])), target_probs, limit=4)
    draft = torch.tensor([[0.25, 0.4], [0.2, 0.8], [0.4, NOT_DRAFTED]], dtype=torch.double)
    method = chain(tiny_model("llama"), 2)
    sums, positions = count_accepted(method, draft, output, greedy=False)
    tokens, rounds, drafted, accepted, passes = sums.tolist()
    # accepted up to each position: 0.5, 0.5 * 1; 0.5, 0.5 * 1; 0.5 (the output ends)
    assert accepted == pytest.approx(2.5) and rounds == 3
    assert (drafted, passes) == (5, 5)
    # one token per round plus accepted tokens, except the output's last, after which is no bonus
    assert tokens == pytest.approx(3 + 0.5 + 0.5 + 0.5)
    assert positions == pytest.approx(np.array([[3, 2], [1.5, 1.0], [3, 1.0]]))


def test_rates_of_engines_by_hand(monkeypatch):
    rows = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]])
    target_probs = torch.tensor([[0.4, 0.5, 0.1], [0.2, 0.7, 0.1]])
    monkeypatch.setattr(teacher_forced, "teacher_forced_rows", lambda *_: rows.log())
    drafter = CachedModel(tiny_model("llama"))
    output = TargetOutput(KnownOutput(None, torch.tensor([0, 1])), target_probs, limit=9)
    match, overlap, first, count = measure_overlaps(drafter, output, Sampling(1.0)).tolist()
    assert (match, count) == (1, 2)  # arg-max: 0 and 1 differ, 1 and 1 agree
    assert overlap == pytest.approx((0.4 + 0.3 + 0.1) + (0.1 + 0.6 + 0.1))
    assert first == pytest.approx(0.4 + 0.7)


def test_sampled_acceptance_is_the_mean_overlap():
    """The expectation of min(1, draft / target) over the target's token is the sum of min(p, q)."""
    generator = torch.Generator().manual_seed(0)
    target, draft = torch.rand(2, 5, generator=generator, dtype=torch.double)
    target, draft = target / target.sum(), draft / draft.sum()
    method = Method(MaxGramDrafter(), FixedLength(1), None)
    mean = 0.0
    for token in range(5):
        output = TargetOutput(KnownOutput(None, torch.tensor([token])), target[None], limit=9)
        sums, _ = count_accepted(method, draft[token][None, None], output, greedy=False)
        mean += float(target[token]) * sums[3]
    assert mean == pytest.approx(float(torch.minimum(target, draft).sum()))
