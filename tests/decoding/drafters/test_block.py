"""Spec-Drafters in the loop: cached results equal recomputed ones."""

from collections.abc import Callable

import pytest
import torch

from drafttrain.decoding.batching import run_single
from drafttrain.decoding.drafters import candidates
from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.teacher_forced_blocks import block_rows
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Output, Sampling, Source
from tests.comparing import close
from tests.decoding.decoded import decoder_of, drawn, sources_for
from tests.decoding.drafters.toy_blocks import CONVENTIONS, toy_drafter
from tests.decoding.drafts import rounds_along
from tests.decoding.expected import expected_probs
from tests.decoding.toys import toy_source
from tests.tiny_drafters import shared, tiny_drafter, with_noise
from tests.tiny_models import EOS, VOCAB

SHARED = {
    "target's encoder": {},
    "target's encoder, paper": {"slots": "paper"},
    "target's encoder, previous token": {"previous_token_rank": 3},
    "target's encoder, few tokens": {"draftable": [*range(1, 31)]},
    "target's encoder, pooled": {"source_pooling": 2},
}
CASES = [(family, name) for family in ("marian", "bart", "t5") for name in CONVENTIONS]
CASES += [(family, name) for family in ("marian", "t5", "whisper") for name in SHARED]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_greedy_output_is_plain_output_and_rounds_are_those_of_one_parallel_pass(
    family, name, monkeypatch
):
    monkeypatch.setattr(candidates, "CANDIDATES", VOCAB)  # all tokens are candidates
    target = CachedModel(shared(family))
    target.model.generation_config.min_new_tokens = 10  # random BART ends at once
    settings = {"decoder_layers": 2} | (CONVENTIONS | SHARED)[name]
    settings |= {"encoder": "target"} if name in SHARED else {}
    drafter = BlockDrafter(with_noise(tiny_drafter(family, **settings)))
    sources = sources_for(target.model)

    def decode(drafter, k: int) -> list[Output]:
        return decoder_of(target, drafter, k).decode_all(sources, 24)

    plain, drafted, blocks_of = decode(NoDrafter(), 1), decode(drafter, 4), slots_along(drafter)
    for source, output, found in zip(sources, plain, drafted, strict=True):
        assert found.tokens == output.tokens
        read = target.read(source)
        blocks = blocks_of(read, output.tokens)
        expected = rounds_along(blocks, output.tokens, 24)
        for played, (draft, emitted) in zip(found.rounds, expected, strict=True):
            if len(draft) < 4 and EOS not in draft:
                break  # slots may attend to later slots, for which no room is left
            assert played.emitted == emitted
            assert played.drafted[: len(emitted)] == draft[: len(emitted)]  # to the first wrong one
    if name.startswith(("anchored", "causal")):  # starts from the target's decoder
        assert sum(len(one.rounds) for one in drafted) < sum(len(one.tokens) for one in plain)


def slots_along(drafter: BlockDrafter) -> Callable[..., torch.Tensor]:
    """Returns a function (source, output tokens) -> greedy blocks at every prefix."""

    def blocks(read: Source, tokens: list[int]) -> torch.Tensor:
        seen = read.input_ids if drafter.model.shape.encoder == "own" else read.encoded
        given, output = read.prefix[1:].tolist(), torch.tensor(tokens)
        return block_rows(drafter.model, seen, output, given).argmax(-1)

    return blocks


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
    session = drafter.open(toy_source(), sampling, drawn())
    tokens = torch.cat((toy_source().prefix, torch.tensor([2, 3])))
    proposal = run_single(session.propose(tokens, None, FixedLength(3)))
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
        state = drafter.encode_all([source])[0]
        [(hidden, logits)] = drafter.slots_all([(state, torch.tensor([]), 3)])
        torch.testing.assert_close(logits, drafter.model.logits(hidden).to(logits))
        return logits

    before = scores()
    drafter.model.get_output_embeddings().weight.mul_(2.0)
    assert not torch.allclose(before, scores())
