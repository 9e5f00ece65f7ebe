"""A language model as drafter: greedy output, caches and hidden states, on real families."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from drafttrain.build.pairs import make_drafter
from drafttrain.decoding.batching import BatchedSteps
from drafttrain.decoding.drafters.causal import CausalDrafter, teacher_forced_rows
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.roles import StopPolicy
from drafttrain.decoding.stopping import (
    Confidence,
    Cumulative,
    Entropy,
    FixedLength,
    HeadPolicy,
    entropy,
    largest_probability,
)
from drafttrain.decoding.types import DraftState, Output, Proposal, Sampling
from drafttrain.models.acceptance_head import AcceptanceHead, AcceptanceHeadConfig
from drafttrain.models.draft_states import ROW_FEATURES, drawn_states
from tests.comparing import close
from tests.decoding.decoded import decoder_of, generate, propose, sources_for
from tests.decoding.drafters.watched import Watched
from tests.decoding.engine.fresh import close_caches, extend, fresh, last_hidden
from tests.decoding.methods import with_rows
from tests.tiny_drafters import noisy
from tests.tiny_models import CAUSAL_FAMILIES, EOS, VOCAB, tiny_model

LONGEST = 12


def stops() -> dict[str, StopPolicy]:
    torch.manual_seed(0)
    heads = {}
    for state, width in (("token", 16), ("drawn", 16 + ROW_FEATURES)):
        head = AcceptanceHead(AcceptanceHeadConfig(hidden_size=width, depth=1, state=state))
        head.out.bias.data.fill_(1.0)
        heads[state] = HeadPolicy(head, 0.5, 6)
    return heads | {
        "fixed": FixedLength(4),
        "shown": replace(FixedLength(4), state_kind="drawn"),
        "entropy": Entropy(2.0, 6),
        "confidence": Confidence(0.4, 6),
        "cumulative": Cumulative(0.3, 6),
    }


def checked(drafter: CausalDrafter, drafts: list[Proposal]) -> Watched:
    """Records every draft. Then the drafter's cache and the hidden states that the policy is shown
    before each token equal those of one prefill of the whole path."""

    def watch(session, source, tokens, target_state, stop) -> BatchedSteps[Proposal]:
        shown: list[list[Tensor]] = []

        def look(state: DraftState, value: float) -> bool:
            shown.append(list(state.hidden))
            return stop.continues(state, value)

        looking = replace(stop, continues=look)
        proposal = yield from session.propose(tokens, target_state, looking)
        drafts.append(proposal)
        count = len(proposal.tokens)
        if count == 0:
            return proposal
        path = tokens.tolist() + proposal.tokens.tolist()[:-1]  # the last token is not in the cache
        assert session.sequence.state.tokens == path
        output = fresh(session.model.model, source, path)
        close_caches(session.sequence.state, output.past_key_values, 1e-9)
        late = 1 if stop.state_kind == "token" else 0  # the last token has no state yet
        known = [0 if stop.state_kind is None else max(0, n - late) for n in range(len(shown))]
        assert [len(states) for states in shown] == known
        hidden = last_hidden(output)
        expected = hidden[len(hidden) - count + 1 :]
        if stop.state_kind == "drawn":
            expected = drawn_states(hidden[-count:], output.logits[0, -count:], proposal.tokens)
        for states in filter(None, shown):
            close(torch.stack(states), expected[: len(states)], 1e-9)
        return proposal

    return Watched(drafter, watch)


def decode(model, drafter, stop, sources) -> list[Output]:
    return decoder_of(model, drafter, stop).decode_all(sources, LONGEST)


@pytest.mark.parametrize("family", ["llama", "gpt2", "marian", "t5"])
def test_greedy_output_is_the_targets_own_under_every_policy(family):
    model = tiny_model(family)
    sources = sources_for(model, 3)
    expected, target = generate(model, sources, LONGEST), CachedModel(model)
    drafter = CachedModel(noisy(model, family))
    lengths, accepted, rejected = set(), set(), set()
    for name, stop in stops().items():
        watched = checked(CausalDrafter(drafter), [])
        outputs = decode(target, watched, stop, sources)
        assert [output.tokens for output in outputs] == expected, name
        rounds = [played for output in outputs for played in output.rounds]
        lengths |= {len(played.drafted) for played in rounds}
        assert all(played.passes == len(played.drafted) for played in rounds)
        accepted |= {played.path[:1] == [0] for played in rounds}
        rejected |= {len(played.path) < len(played.drafted) for played in rounds}
    assert len(lengths) > 2
    assert accepted == rejected == {True, False}


def test_a_drafter_of_another_family_and_start_token_encodes_the_source_itself():
    """BART's decoder starts from EOS, Marian's from padding."""
    model, other = tiny_model("bart"), tiny_model("marian", seed=5)
    sources = sources_for(model, 3)
    drafter = CausalDrafter(CachedModel(other))
    outputs = decode(model, drafter, 3, sources)
    assert [output.tokens for output in outputs] == generate(model, sources, LONGEST)
    committed = torch.cat([sources[0].prefix, torch.tensor([7, 8])])
    proposal = propose(drafter, sources[0], committed, 2)
    own = make_source(sources[0].input_ids, other)
    with torch.no_grad():
        path = torch.cat([own.prefix, torch.tensor([7, 8])])
        logits = other(input_ids=own.input_ids[None], decoder_input_ids=path[None]).logits
    assert int(proposal.tokens[0]) == int(logits[0, -1].argmax())


def test_a_draft_ends_with_its_first_eos():
    model = tiny_model("llama")
    model.lm_head.weight.data[EOS] = model.lm_head.weight.data[9]  # EOS, the first, wins the tie
    watched = checked(CausalDrafter(CachedModel(model)), drafts := [])
    sources = sources_for(model, 8)
    outputs = decode(model, watched, 8, sources)
    assert [output.tokens for output in outputs] == generate(model, sources, LONGEST)
    drafts = [proposal.tokens.tolist() for proposal in drafts]
    assert any(draft[-1:] == [EOS] and len(draft) < 8 for draft in drafts)
    assert not any(EOS in draft[:-1] for draft in drafts)


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_a_drafter_of_few_tokens_scores_these_alone(family):
    target = tiny_model(family)
    whole, few = (noisy(target, family) for _ in range(2))
    tokens = few.config.draftable_tokens = [EOS, *range(6, VOCAB, 3)]
    every, part = CachedModel(whole), CausalDrafter.of(few, target).model
    assert part.vocabulary == VOCAB
    source = make_source(torch.tensor([5, 6, 7]), target)
    scores = [extend(model, model.encode(source), source.prefix).logits for model in (every, part)]
    close(scores[0][:, tokens], scores[1][:, tokens])
    others = [token for token in range(VOCAB) if token not in tokens]
    assert (scores[1].softmax(-1)[:, others] == 0).all()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "T 1"])
def test_stop_policies_do_not_see_undrafted_tokens(sampling):
    target = tiny_model("llama")
    few = noisy(target, "llama")
    tokens = few.config.draftable_tokens = list(range(6, VOCAB, 3))
    drafter = CausalDrafter.of(few, target)
    seen: list[list[Tensor]] = []
    states: list[Tensor] = []

    def look(state: DraftState, value: float) -> bool:
        seen.append(list(state.logits))
        states[:] = state.hidden
        return True

    stop = replace(FixedLength(4), state_kind="drawn", continues=look)
    source = make_source(torch.tensor([5, 6, 7]), target)
    proposal = propose(drafter, source, None, stop, sampling)
    whole = torch.stack(list(proposal.logits()))
    assert whole.shape == (4, VOCAB) and [len(rows) for rows in seen] == [0, 1, 2, 3]
    for row, of_all in zip(seen[-1], whole, strict=False):
        drafted = of_all[tokens]
        assert largest_probability(row) == pytest.approx(largest_probability(drafted))
        assert entropy(row) == pytest.approx(entropy(drafted))
    path = source.prefix.tolist() + proposal.tokens.tolist()[:-1]
    hidden = last_hidden(fresh(drafter.model.model, source, path))[-len(whole) :]
    expected = drawn_states(hidden, whole, proposal.tokens)
    close(torch.stack(states), expected[:3], 1e-6)


@pytest.mark.parametrize("rows", [VOCAB - 7, VOCAB + 8], ids=["smaller", "larger"])
def test_scores_of_a_drafter_with_other_embeddings_are_padded_or_cut(rows):
    target = tiny_model("llama")
    model, known = with_rows(rows, target, 1), min(rows, VOCAB)
    fitted, source = make_drafter(model, target).model, make_source([5, 6, 7], target)
    one, other = (
        extend(each, each.encode(source), source.prefix).logits
        for each in (fitted, CachedModel(model))
    )
    assert one.shape == (1, VOCAB) and fitted.vocabulary == known
    close(one[:, :known], other[:, :known])
    assert (one[:, known:] == -torch.inf).all()
    along = teacher_forced_rows(fitted, source, torch.tensor([39, 38, 5, 9]))
    assert along.shape == (4, VOCAB) and along.argmax(-1).max() < known
