"""Spec-Drafters in the loop: cached results equal recomputed ones, encoder states are shared."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from drafttrain.decoding.batching import run_single
from drafttrain.decoding.drafters import candidates, teacher_forced_blocks
from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.drafters.cascade import Level, cascade
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.teacher_forced_blocks import block_rows
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.engine.spec_drafter import RowReader
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.types import Output, Sampling, Source
from drafttrain.models.spec_drafter.layout import PREFIX, Rows
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.models.spec_drafter.pooling import group_means
from tests.comparing import close
from tests.decoding.decoded import decoder_of, drawn, propose, sources_for
from tests.decoding.drafts import rounds_along
from tests.decoding.engine.fresh import cross_keys_values, extend
from tests.decoding.expected import expected_probs
from tests.decoding.toys import CONVENTIONS, toy_drafter, toy_source
from tests.tiny_drafters import shared, tiny_drafter, with_noise
from tests.tiny_models import EOS, VOCAB, near_copy, tiny_source

SHARED = {
    "target's encoder": {},
    "target's encoder, paper": {"slots": "paper"},
    "target's encoder, previous token": {"previous_token_rank": 3},
    "target's encoder, few tokens": {"draftable": [*range(1, 31)]},
    "target's encoder, pooled": {"source_pooling": 2},
}
CASES = [(family, name) for family in ("marian", "bart", "t5") for name in CONVENTIONS]
CASES += [(family, name) for family in ("marian", "t5", "whisper") for name in SHARED]
NEW = 16


@cache
def target_of(family: str) -> CachedModel:
    target = CachedModel(shared(family))
    target.model.generation_config.min_new_tokens = 8  # random BART ends at once
    return target


def decode(
    target: CachedModel, drafter: Drafter, sources: list[Source], batch_size: int = 1
) -> list[Output]:
    return decoder_of(target, drafter).decode_all(sources, NEW, batch_size)


@cache
def plain_outputs(family: str) -> list[Output]:
    target = target_of(family)
    return decode(target, NoDrafter(), sources_for(target.model, 3))


@pytest.mark.covered
@pytest.mark.parametrize(("family", "name"), CASES)
def test_greedy_output_is_plain_output_and_rounds_are_those_of_one_parallel_pass(
    family, name, monkeypatch
):
    monkeypatch.setattr(candidates, "CANDIDATES", VOCAB)  # all tokens are candidates
    target = target_of(family)
    settings = {"decoder_layers": 2} | (CONVENTIONS | SHARED)[name]
    settings |= {"encoder": "target"} if name in SHARED else {}
    drafter = BlockDrafter(with_noise(tiny_drafter(family, **settings)))
    sources, plain = sources_for(target.model, 3), plain_outputs(family)
    drafted = decode(target, drafter, sources)
    for source, output, found in zip(sources, plain, drafted, strict=True):
        assert found.tokens == output.tokens
        read, tokens = target.read(source), torch.tensor(output.tokens)
        seen = read.encoded if name in SHARED else read.input_ids
        blocks = block_rows(drafter.model, seen, tokens, read.prefix[1:].tolist()).argmax(-1)
        expected = rounds_along(blocks, output.tokens, NEW)
        for played, (draft, emitted) in zip(found.rounds, expected, strict=True):
            if len(draft) < 4 and EOS not in draft:
                break  # slots may attend to later slots, for which no room is left
            assert played.emitted == emitted
            assert played.drafted[: len(emitted)] == draft[: len(emitted)]  # to the first wrong one
    if name.startswith(("anchored", "causal")):  # starts from the target's decoder
        assert sum(len(one.rounds) for one in drafted) < sum(len(one.tokens) for one in plain)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    ("slots", "rank"), [("anchored", 3), ("paper", 3), ("anchored", 0)], ids=str
)
def test_drawn_rows_are_coupled_to_the_token_drawn_before(
    slots, rank, temperature, count, monkeypatch
):
    """Exactness tests cannot find errors here, because rows without previous-token features are
    valid but accepted less. The rows before warping must be those the tokens were chosen from."""
    monkeypatch.setattr(candidates, "CANDIDATES", count)
    drafter, sampling = toy_drafter(slots=slots, previous_token_rank=rank), Sampling(temperature)
    tokens = torch.cat((toy_source().prefix, torch.tensor([2, 3])))
    proposal = propose(drafter, toy_source(), tokens, 3, sampling)
    fresh = drafter.open(toy_source(), sampling, drawn())
    with torch.inference_mode():
        rows = torch.stack(list(proposal.logits()))
        hidden = run_single(fresh.slot_rows(tokens, 3))[0]
        expected = drafter.model.logits(hidden)
        if rank:
            previous = torch.cat((tokens[-1:], proposal.tokens[:-1]))
            best = expected >= expected.sort(descending=True).values[:, count - 1 : count]
            expected = torch.where(best, drafter.model.logits(hidden, previous), expected)
    close(rows, expected, 1e-12)
    if temperature:
        close(proposal.draft_probs, expected_probs(expected, sampling), 1e-12)


@pytest.mark.parametrize("slots", ["anchored", "paper"])
@torch.inference_mode()
def test_blocks_of_one_pass_rescore_the_tokens_that_a_session_rescores(slots, monkeypatch):
    for module in (candidates, teacher_forced_blocks):
        monkeypatch.setattr(module, "CANDIDATES", 3)
    drafter = toy_drafter(slots=slots, previous_token_rank=3)
    source, output = toy_source(), torch.tensor([2, 3, 3, 2, 1])
    session, k = drafter.open(source, Sampling(), drawn()), drafter.model.config.k
    blocks = block_rows(drafter.model, source.input_ids, output)
    for prefix in range(len(output)):
        tokens = torch.cat((source.prefix, output[:prefix]))
        states, logits = run_single(session.slot_rows(tokens, k))
        count = min(k, len(output) - prefix)
        before = torch.cat((tokens, output[prefix:]))[len(tokens) - 1 :][:count]
        expected = drafter.correction.after(states[:count], logits[:count], before)
        close(blocks[prefix, :count], expected, 1e-12)


@pytest.mark.parametrize("settings", CONVENTIONS.values(), ids=CONVENTIONS.keys())
def test_a_session_whose_sequence_changed_drafts_as_a_fresh_one(settings):
    """This occurs in a cascade, whose outer levels may reject tokens that the session has seen."""
    drafter, randomness = toy_drafter(**settings), drawn()
    session = drafter.open(toy_source(), Sampling(), randomness)
    for output in ([], [2, 3, 3], [2, 3, 1, 1], [3], [3, 2, 2], [3, 2]):
        tokens = torch.cat((toy_source().prefix, torch.tensor(output, dtype=torch.long)))
        fresh = drafter.open(toy_source(), Sampling(), randomness)
        with torch.inference_mode():
            close(*(run_single(one.slot_rows(tokens, 3))[0] for one in (session, fresh)), 1e-12)


@torch.no_grad()
def test_scores_of_few_tokens_follow_their_weights():
    drafter = BlockDrafter(tiny_drafter("marian", slots="paper", draftable=list(range(30))))
    source = make_source([5, 9, 7], shared("marian"))

    def scores() -> torch.Tensor:
        session = drafter.open(source, Sampling(), drawn())
        hidden, logits = run_single(session.slot_rows(source.prefix, 3))
        torch.testing.assert_close(logits, drafter.model.logits(hidden).to(logits))
        return logits

    before = scores()
    drafter.model.get_output_embeddings().weight.mul_(2.0)
    assert not torch.allclose(before, scores())


# --- drafters that read the target's encoder states ----------------------------------------------

FAMILIES = ("marian", "t5", "whisper")


def drafter_of(family: str, noise: float = 0.02, **settings: object) -> SpecDrafter:
    """Returns a drafter as deep as its target that is right on some tokens."""
    given = {"encoder": "target", "decoder_layers": 2}
    return with_noise(tiny_drafter(family, **given | settings), noise)


def encoded(model: PreTrainedModel, source: Source) -> torch.Tensor:
    with torch.inference_mode():
        return model.get_encoder()(*(value[None] for value in source.inputs.values()))[0][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_of_equal_depth_equals_its_target(family):
    target, drafter = shared(family), drafter_of(family, noise=0.0)
    source, tokens = tiny_source([5, 9, 20, 7, 1], target), torch.randint(4, VOCAB, (1, 6))
    states = encoded(target, source)[None]
    positions = torch.arange(6)[None]
    rows = Rows(tokens, positions, torch.full_like(tokens, PREFIX), positions)
    read = RowReader(drafter)
    with torch.no_grad():
        inputs = {name: value[None] for name, value in source.inputs.items()}
        expected = target(**inputs, decoder_input_ids=tokens).logits
        found = drafter.logits(read(rows, read.encode(states, None)).hidden)
    assert (found - expected).abs().max() < (1e-5 if family == "t5" else 1e-12)


@pytest.mark.parametrize("pooling", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_of_cross_attention_are_the_targets(family, pooling):
    """Copied layers start with the target's keys and values; with pooling these are means."""
    settings = {"decoder_layers": 1, "source_pooling": pooling, "noise": 0.0}
    target, drafter = target_of(family), BlockDrafter(drafter_of(family, **settings))
    source = sources_for(target.model)[0]
    state = target.encode(source)
    extend(target, state, state.source.prefix)
    [made] = drafter.encode_all([replace(state.source, encoded=state.encoded)])
    extend(drafter.cached, made, state.source.prefix)
    ours, theirs = cross_keys_values(made, 0), cross_keys_values(state, 1)
    for own, of_target in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, group_means(of_target, pooling)[0], rtol=1e-10, atol=1e-10)


def test_a_clip_is_encoded_once_for_target_and_drafter():
    target, shapes = target_of("whisper"), []
    sources = sources_for(target.model)
    hook = target.model.get_encoder().register_forward_hook(
        lambda *call: shapes.append(call[2][0].shape)
    )
    decode(target, BlockDrafter(drafter_of("whisper")), sources, 2)
    hook.remove()
    assert sum(shape[0] for shape in shapes) == len(sources)


def test_a_drafter_with_its_own_encoder_uses_it_next_to_one_that_shares():
    target, model = target_of("whisper"), near_copy(shared("whisper"), 0.05, seed=1)
    own, sources = CausalDrafter(CachedModel(model)), sources_for(target.model)
    expected, calls = decode(target, own, sources), []
    model.get_encoder().register_forward_hook(lambda *call: calls.append(call))
    levels = [Level("own", own), Level("slots", BlockDrafter(drafter_of("whisper")))]
    found = decode(target, cascade(levels, [[2, 0], [1]], 1.0), sources)
    assert calls and [one.tokens for one in found] == [one.tokens for one in expected]
    first = [[one.rounds[0].drafted[0] for one in outputs] for outputs in (found, expected)]
    assert first[0] == first[1]


def test_a_source_that_no_target_has_read_is_refused():
    drafter = BlockDrafter(drafter_of("marian"))
    source = sources_for(shared("marian"))[0]
    with pytest.raises(AssertionError, match="not encoded"):
        drafter.encode_all([source])
