"""One padded teacher-forced pass gives the rows of each sequence alone."""

import pytest
import torch
from transformers import PreTrainedModel

from drafttrain.decoding.drafters.causal import teacher_forced_rows
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.engine.teacher_forcing import (
    projection_scale,
    teacher_force,
    teacher_forced_states,
)
from tests.comparing import close
from tests.decoding.engine.fresh import fresh, last_hidden
from tests.tiny_families import any_family
from tests.tiny_models import CAUSAL_FAMILIES, FAMILIES, VOCAB, tiny_model

SOURCES = [[5, 9, 17, 30, 8, 21], [7], [4, 11, 6]]
TARGETS = [[12, 6, 6, 1], [9, 33, 20, 10, 5, 8, 1], [22]]


def alone(model: PreTrainedModel, source: list[int], target: list[int]):
    """Returns logits [L, V] and states [L + 1, D] of one sequence from the model's forward."""
    given = make_source(source, model)
    output = fresh(model, given, [*given.prefix.tolist(), *target])
    first = len(given.prefix)
    return output.logits[0, first - 1 : -1], last_hidden(output)[first - 1 :]


@pytest.mark.parametrize(
    "family", [*CAUSAL_FAMILIES, "opt-projected", "Cohere", *FAMILIES, "m2m100"]
)
def test_a_padded_batch_equals_single_sequences(family):
    """Cohere scales its logits, as an example of families with another output projection."""
    name, *projected = family.split("-projected")
    model = any_family(name, **({"word_embed_proj_dim": 8} if projected else {}))
    forced = teacher_force(model, SOURCES, TARGETS)
    states = teacher_forced_states(model, SOURCES, TARGETS)
    for source, target, seen, state in zip(SOURCES, TARGETS, forced, states, strict=True):
        logits, hidden = alone(model, source, target)
        close(seen.logits, logits)
        close(seen.before, hidden[:-1])
        close(state, hidden)


def test_only_rows_of_the_output_are_projected():
    model = tiny_model("llama")
    assert projection_scale(model) == 1.0
    rows = []
    model.lm_head.register_forward_hook(
        lambda module, inputs, output: rows.append(output.shape[:-1].numel())
    )
    teacher_force(model, SOURCES, TARGETS)
    teacher_forced_states(model, SOURCES, TARGETS)
    assert rows == [sum(map(len, TARGETS)), 0]


def test_a_soft_cap_is_found_even_if_the_logits_are_small():
    model = any_family("Gemma2")
    model.get_output_embeddings().weight.data *= 1e-2
    assert projection_scale(model) is None


def test_logits_are_float32_where_the_model_is_narrower():
    model = tiny_model("llama").to(torch.bfloat16)
    [forced, *_] = teacher_force(model, SOURCES, TARGETS)
    assert forced.logits.dtype == torch.float32
    assert forced.before.dtype == torch.bfloat16


def test_an_output_without_tokens_has_no_rows():
    [empty, full] = teacher_force(tiny_model("gpt2"), [[5, 6], [7]], [[], [8]])
    assert empty.logits.shape == (0, VOCAB) and empty.before.shape == (0, 16)
    assert full.logits.shape == (1, VOCAB)


def test_an_empty_source_is_refused_by_number():
    with pytest.raises(ValueError, match="source 1 of the batch has no tokens"):
        teacher_force(tiny_model("llama"), [[5], []], [[6], [7]])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "Cohere"])
def test_rows_of_a_drafter_of_few_tokens_are_those_that_the_engine_drafts_with(family):
    """Labels of acceptance heads must be for the tokens that the engine drafts."""
    model = any_family(family)
    everything = [forced.logits for forced in teacher_force(model, SOURCES, TARGETS)]
    model.config.draftable_tokens = few = [1, 6, 9, 22, 33]
    engine = CachedModel(model, draftable=torch.tensor(few))
    found = teacher_force(model, SOURCES, TARGETS)
    for source, target, forced, whole in zip(SOURCES, TARGETS, found, everything, strict=True):
        ours = teacher_forced_rows(engine, make_source(source, model), torch.tensor(target))
        torch.testing.assert_close(forced.logits, ours, atol=1e-9, rtol=0)
        assert torch.isin(forced.logits.argmax(-1), torch.tensor(few)).all()
        torch.testing.assert_close(forced.logits[:, few], whole[:, few])
