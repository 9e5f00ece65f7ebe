"""Block heads in the loop: greedy as plain, later heads in cascades."""

import pytest
import torch

from drafttrain.decoding.batching import run_single
from drafttrain.decoding.drafters.block_heads import (
    BlockHeadsDrafter,
    BlockHeadsSession,
    predict_blocks,
)
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.engine.teacher_forcing import project
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.types import Sampling
from tests.decoding.decoded import decoder_of, drawn
from tests.decoding.drafts import rounds_along
from tests.tiny_drafters import block_heads
from tests.tiny_families import any_family
from tests.tiny_models import tiny_model


@pytest.mark.parametrize("family", ["marian", "t5", "bart", "llama", "gpt2"])
def test_greedy_output_is_plain_output_and_rounds_are_those_of_one_parallel_pass(family):
    model = tiny_model(family)
    model.generation_config.min_new_tokens = 10
    target, heads = CachedModel(model), block_heads(std=0.1)
    source = make_source([5, 9, 20, 7, 1], model)

    def decode(drafter: Drafter, k: int):
        return decoder_of(target, drafter, k).decode_all([source], 24)[0]

    plain, drafted = decode(NoDrafter(), 1), decode(BlockHeadsDrafter(heads, model), 9)
    assert drafted.tokens == plain.tokens
    assert len(drafted.rounds[0].drafted) == 0  # the target has no row yet
    blocks = predict_blocks(heads, model, source.input_ids, torch.tensor(plain.tokens))
    expected = rounds_along(blocks, plain.tokens, 24)
    assert [(round.drafted, round.emitted) for round in drafted.rounds] == list(expected)


def session() -> tuple[BlockHeadsSession, TargetState, torch.Tensor]:
    """Returns a session after 6 committed tokens, the target state and the rows of its 3 heads."""
    model, heads = tiny_model("llama"), block_heads()
    drafter = BlockHeadsDrafter(heads, model)
    state = TargetState(6, {-1: torch.randn(3, 16, dtype=torch.float64)})
    with torch.inference_mode():
        rows = project(model, heads.each(state.hidden[-1][-1:])[:, 0])
    return drafter.open(make_source([2, 3], model), Sampling(), drawn()), state, rows


@pytest.mark.parametrize("others", [0, 1, 2, 3, 5])
def test_after_drafts_of_others_later_heads_continue(others):
    """In a horizontal cascade; this may already be the session's first call."""
    drafts, state, rows = session()
    proposal = run_single(drafts.propose(torch.arange(6 + others), state, FixedLength(10)))
    assert proposal.tokens.tolist() == rows.argmax(-1)[others:].tolist()
    assert proposal.passes == (1 if others < 3 else 0)
    assert proposal.draw_kind == "deterministic"


def test_nothing_is_drafted_before_the_targets_first_token():
    drafts, state, _ = session()
    assert len(run_single(drafts.propose(torch.arange(2), None, FixedLength(3))).tokens) == 0
    assert len(run_single(drafts.propose(torch.arange(6), state, FixedLength(3))).tokens) == 3


def test_a_target_whose_logits_are_more_than_a_projection_is_refused():
    """Cohere multiplies logits by a scale."""
    with pytest.raises(ValueError, match="logits of a 'cohere' model are not just its output"):
        BlockHeadsDrafter(block_heads(), any_family("Cohere"))
