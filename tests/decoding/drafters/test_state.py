"""State drafters: their inputs, drafts and caches."""

import pytest
import torch
from transformers import GPT2Config, PreTrainedModel

from drafttrain.build.pairs import make_drafter
from drafttrain.config.recipes import FollowTargetConfig
from drafttrain.data.batches.examples import Example
from drafttrain.data.batches.masked_blocks import BlocksCollator, blocks_of_rows
from drafttrain.decoding.batching import run_single
from drafttrain.decoding.drafters.teacher_forced import read_outputs, teacher_forced_probs
from drafttrain.decoding.engine.architectures import check_states
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.types import Sampling
from drafttrain.training.objectives.follow_states import FollowStates
from tests.decoding.decoded import decoder_of
from tests.tiny_drafters import state_drafter
from tests.tiny_models import tiny_model

K = 4
PROMPT = [9, 20, 7, 30, 11, 6]


def endless_target() -> PreTrainedModel:
    target = tiny_model("llama", num_hidden_layers=4)
    target.generation_config.eos_token_id = None
    return target


@pytest.mark.parametrize("mode", ["blocks", "linked"])
def test_decoding_drafts_as_the_teacher_forced_pass(mode):
    """Decoding, teacher-forced drafts and training agree block by block."""
    target = endless_target()
    model = state_drafter(target, [2, 3], mode)
    if mode == "linked":
        model.previous_token.out.weight.data *= 4.0  # wrong previous tokens change the arg-max
    drafter, prompt = make_drafter(model, target), PROMPT
    source = make_source(prompt, target)
    [output] = decoder_of(target, drafter, K).decode_all([source], 14)
    tokens = torch.tensor(output.tokens)
    [known] = read_outputs(CachedModel(target), [source], [tokens], drafter.requires)
    found = run_single(teacher_forced_probs(drafter, known, [K] * len(tokens), Sampling()))
    assert (found[0] == -1).all()
    longer = run_single(teacher_forced_probs(drafter, known, [K + 2] * len(tokens), Sampling()))
    assert longer[:, :K].tolist() == found.tolist()  # right or wrong: greedy, 1 or 0
    assert (longer[:, K:] == -1).all()  # these slots do not exist

    batch = BlocksCollator(pad_token_id=0, mask_token=0, k=K, reads_prompt=False).alone(
        [Example(0, 0, list(prompt), output.tokens)]
    )
    objective = FollowStates(model, FollowTargetConfig(), target)
    with torch.no_grad():
        logits, _ = objective.rows(batch)
    blocks = blocks_of_rows(batch, logits.argmax(-1), K, len(tokens))
    place = 0
    for played in output.rounds:
        right = [
            token == own for token, own in zip(played.drafted, output.tokens[place:], strict=False)
        ]
        probs = found[place, : len(right)].tolist()
        known = right.index(False) + 1 if False in right else len(right)
        assert probs[:known] == [float(one) for one in right[:known]]
        assert list(played.drafted[:known]) == blocks[place, :known].tolist()
        place += len(played.emitted)
    assert sum(len(played.path) for played in output.rounds) > 3


def test_its_cache_is_the_targets_own_after_every_round():
    """Columns of verified tokens hold the target's keys and values, whatever was drafted."""
    target = endless_target()
    drafter, model = make_drafter(state_drafter(target, [1, 3]), target), CachedModel(target)
    opened = []
    open_session = drafter.open
    drafter.open = lambda *given: opened.append(open_session(*given)) or opened[-1]
    decoder = decoder_of(model, drafter, K)
    prompt, tokens = list(PROMPT), []
    for played in decoder.decode([make_source(prompt, target)], 12):
        if played.drafted:
            own, text = opened[0], torch.tensor(prompt + tokens[:-1])
            assert own.verified == len(text)
            with torch.no_grad():
                layers = target(text[None]).past_key_values.layers
            expected = [part[0] for n in (1, 3) for part in (layers[n].keys, layers[n].values)]
            kept = own.state.keys_values([0, 1], 0, len(text))
            assert (torch.stack(expected) - kept).abs().max() < 1e-12
        tokens += played.emitted


def test_a_family_whose_positions_are_embedded_is_refused():
    with pytest.raises(ValueError, match="'gpt2' model cannot have a state drafter"):
        check_states(GPT2Config())
