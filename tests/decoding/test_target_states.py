"""A drafter gets the target's hidden states of the layers that it requires, and no others."""

import pytest
import torch

from drafttrain.decoding.batching import BatchedSteps, as_steps
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.tree import TreeDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.target_states import TargetRequirements, TargetState
from drafttrain.decoding.trees.chosen import Optimal
from drafttrain.decoding.types import Proposal, Source
from tests.decoding.decoded import generate, run, sources_for
from tests.decoding.drafters.watched import Watched
from tests.decoding.drafts import half_right
from tests.decoding.engine.fresh import fresh
from tests.tiny_models import near_copy, tiny_model

Seen = list[tuple[Source, list[int], TargetState | None]]
"""The source, tokens and target state of every call of `propose`."""


def noting(drafter: Drafter, requires: TargetRequirements, seen: Seen) -> Watched:
    """Wraps a drafter with these requirements; records its inputs in `seen`."""

    def watch(session, source, tokens, target_state, stop) -> BatchedSteps[Proposal]:
        seen.append((source, tokens.tolist(), target_state))
        return (yield from as_steps(session.propose(tokens, target_state, stop)))

    watched = Watched(drafter, watch)
    watched.requires = requires
    return watched


@pytest.mark.covered
@pytest.mark.parametrize("family", ["bart", "t5", "llama", "gpt2", "opt"])
@pytest.mark.parametrize("branching", [False, True], ids=["chains", "trees"])
def test_the_drafter_sees_the_targets_states_at_all_rows_verified_since(family, branching):
    model = tiny_model(family)
    sources = sources_for(model)
    outputs = generate(model, sources, 24)
    source, output = max(zip(sources, outputs, strict=True), key=lambda pair: len(pair[1]))
    drafter = half_right([source], [output])
    if branching:
        small = CausalDrafter(CachedModel(near_copy(model, 0.05, seed=1)))
        drafter = TreeDrafter(small, Optimal(8))
    requires = TargetRequirements(layers=(0, -1))
    run(model, [source], noting(drafter, requires, seen := []))
    (_, first, nothing), *later = seen
    assert nothing is None
    known = 0  # rows that the drafter has received
    for _, tokens, state in later:
        assert state.committed == len(tokens)
        output = fresh(model, source, tokens[:-1])
        states = output.get("decoder_hidden_states") or output.hidden_states
        for layer, place in ((0, 1), (-1, -1)):  # index 0 is the embeddings
            rows = states[place][0, known:]
            torch.testing.assert_close(state.hidden[layer], rows, rtol=1e-10, atol=1e-10)
        known = len(tokens) - 1
    assert len(first) == len(source.prefix) and len(later) > 2


def test_states_that_no_drafter_reads_are_not_kept():
    model = tiny_model("bart")
    sources = sources_for(model)[:1]
    drafter = half_right(sources, generate(model, sources, 24))
    run(model, sources, noting(drafter, TargetRequirements(), seen := []))
    assert all(state.hidden == {} for *_, state in seen[1:])


@pytest.mark.parametrize("requests", [True, False])
def test_sources_keep_encoder_states_for_drafters_that_read_them(requests):
    model = tiny_model("bart")
    sources = sources_for(model)[:2]
    drafter = half_right(sources, generate(model, sources, 24))
    run(model, sources, noting(drafter, TargetRequirements(encoder=requests), seen := []))
    assert len(seen) > 2
    for source, *_ in seen:
        if not requests:
            assert source.encoded is None
            continue
        with torch.inference_mode():
            expected = model.get_encoder()(source.input_ids[None])[0][0]
        torch.testing.assert_close(source.encoded, expected, rtol=1e-10, atol=1e-10)
