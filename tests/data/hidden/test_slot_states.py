"""Labels of slots equal the acceptance in real rounds of speculative sampling."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.build.pairs import make_drafter
from drafttrain.config.base import ConfigError
from drafttrain.data.hidden import labels as slot_blocks
from drafttrain.data.hidden.cache import build_cache, check_cache
from drafttrain.data.hidden.labels import Labelling, draw_prefixes, label_slots
from drafttrain.data.hidden.states import open_cache
from drafttrain.data.shards.outputs import ShardRow, load_distilled
from drafttrain.decoding.batching import run_single
from drafttrain.decoding.drafters.teacher_forced import read_outputs, teacher_forced_probs
from drafttrain.decoding.drafters.teacher_forced_blocks import block_states
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.engine.teacher_forcing import states_before, teacher_force
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.types import Sampling
from drafttrain.decoding.verifiers import RejectionSampling
from tests.data.hidden.tiny_cache import MODELS, columns, make_pair, settings
from tests.decoding.enumeration import enumerate_outcomes
from tests.tiny_drafters import MASK, drafter_of
from tests.tiny_models import EOS, VOCAB, near_copy, tiny_model

WORDS = 6
"""Vocabulary size of the enumerated pair."""
SOURCE, BEGUN = [5, 4, 5, EOS], [4, 5]
SAMPLING = Sampling(3.0, top_k=5)

SHAPES = {
    "anchored": {},
    "coupled": {"previous_token_rank": 3},
    "paper": {"slots": "paper"},
    "bidirectional": {"slots": "paper", "prefix_attention": "bidirectional"},
    "target's encoder": {"encoder": "target", "previous_token_rank": 3},
    "causal": {"slot_attention": "causal", "previous_token_rank": 3},
    "masks": {"masks": True},
}


def tiny_pair(vocab: int = WORDS, **shape):
    """Returns a target and a drafter initialised from it, in float64."""
    if shape.pop("masks", False):
        target = tiny_model("llama", vocab_size=vocab)
        return target, masked_copy(target, shape.get("k", 2))
    target = tiny_model("marian", vocab_size=vocab, tie_word_embeddings=True)
    parts = "encoder" if shape.get("slots") == "paper" else "both"
    drafter = drafter_of(target, parts, **({"k": 2, "decoder_layers": 2} | shape))
    if drafter.previous_token is not None:
        torch.nn.init.normal_(drafter.previous_token.out.weight, std=0.5)
    return target, drafter


def masked_copy(target: PreTrainedModel, k: int) -> PreTrainedModel:
    """Returns a noisy copy of a decoder-only target that drafts blocks with mask tokens."""
    drafter = near_copy(target, 0.1, seed=1)
    drafter.config.pard_token, drafter.config.k = MASK, k
    return drafter


def labelling(pair, sampling: Sampling = SAMPLING, **changes) -> Labelling:
    target, drafter = pair
    return Labelling(
        target=target,
        drafter=drafter,
        processors=CachedModel(target).processors(sampling),
        sampling=sampling,
        max_new_tokens=12,
        state="slot",
        mixing=0.0,
        settings=settings(Path(), seed=0, **({"k": 2, "batch_tokens": 64} | changes)),
        places=None,
        slots=make_drafter(drafter, target),
    )


def judge(target, drafted: list[int]) -> Tensor:
    """Returns the target's logits [k + 1, V] that verify a draft after BEGUN."""
    [forced] = teacher_force(target, [SOURCE], [[*BEGUN, *drafted, 0]])
    return forced.logits[len(BEGUN) :]


def real_rounds(pair) -> dict[tuple[int, ...], float]:
    """Enumerates the probability of each accepted path after BEGUN with the real drafter, policy
    and verifier."""
    target, drafter = pair
    source = CachedModel(target).read(make_source(SOURCE, target))
    drafts = make_drafter(drafter, target)
    tokens = torch.cat([source.prefix, torch.tensor(BEGUN)])
    shown = TargetState(len(tokens), {-1: states_before(target, [source], [BEGUN])[0]})

    def one_round(randomness) -> tuple[int, ...]:
        session = drafts.open(source, SAMPLING, randomness)
        proposal = run_single(session.propose(tokens, shown, FixedLength(2)))
        drafted = proposal.tokens.tolist()
        verdict = RejectionSampling().verify(proposal, judge(target, drafted), SAMPLING, randomness)
        return tuple(drafted[: len(verdict.path)])

    law: dict[tuple[int, ...], float] = defaultdict(float)
    for path, probability in enumerate_outcomes(one_round):
        law[path] += probability
    return law


@pytest.mark.parametrize("shape", SHAPES)
def test_labels_and_coins_are_the_law_of_real_rounds(shape, monkeypatch):
    """P(a accepted) = target(a) survival(a), and P(a and one more) = that times label(slot 2 | a).

    Survival and label are those of an output that continues with a; both equations are exact.
    """
    pair = tiny_pair(**SHAPES[shape])
    law, coins = real_rounds(pair), []
    survival = slot_blocks._survival
    monkeypatch.setattr(slot_blocks, "draw_prefixes", lambda numbers, count, first: [len(BEGUN)])
    monkeypatch.setattr(slot_blocks, "row_uniforms", lambda *key: np.zeros((4, 3)))
    monkeypatch.setattr(
        slot_blocks, "_survival", lambda *rows: coins.append(survival(*rows)) or coins[-1]
    )
    emitted = warp(judge(pair[0], [4, 4])[0], SAMPLING)
    seen = 0.0
    for token in set(range(WORDS)) - {EOS}:
        coins.clear()
        [[labelled]] = label_slots(labelling(pair), [ShardRow(0, SOURCE, [*BEGUN, token, 5])])
        first, coin = float(labelled.acceptance[0]), float(coins[0][0])
        accepted = {path: p for path, p in law.items() if path[:1] == (token,)}
        more = sum(p for path, p in accepted.items() if len(path) == 2)
        assert first == pytest.approx(1 - law[()], abs=1e-12)
        assert sum(accepted.values()) == pytest.approx(float(emitted[token]) * coin, abs=1e-12)
        assert labelled.positions.tolist() == ([2, 3] if coin > 0 else [2])
        if coin > 0:
            second = float(labelled.acceptance[1])
            assert more == pytest.approx(float(emitted[token]) * coin * second, abs=1e-12)
        seen += more
    assert 0.01 < seen < 0.99


@torch.inference_mode()
def test_a_slot_is_seen_as_often_as_its_coin_says():
    pair, mixes, begun = tiny_pair(previous_token_rank=3), 1000, [4, 5]
    [forced] = teacher_force(pair[0], [SOURCE], [[*begun, 0]])
    path = torch.tensor([*begun, 0])
    states, previous = block_states(pair[1], torch.tensor(SOURCE), path)
    target_probs = warp(forced.logits[2], SAMPLING)
    draft_probs = warp(pair[1].logits(states, previous)[2, 0], SAMPLING)
    survival = (draft_probs / target_probs).clamp(max=1.0).nan_to_num(1.0)
    token = int((survival - 0.5).abs().argmin())  # neither certain nor impossible
    share = float(survival[token])
    assert 0.05 < share < 0.95
    [many] = label_slots(labelling(pair, mixes=mixes), [ShardRow(3, SOURCE, [*begun, token, 4])])
    # position 3 is always slot 1 of block 3, and slot 2 of block 2 if slot 1 is accepted
    seen = sum(int((mix.positions == 3).sum()) for mix in many) / mixes - 1
    assert abs(seen - share) < 4 * (share * (1 - share) / mixes) ** 0.5


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_labels_end_at_the_first_wrong_slot(shape):
    """Labels of greedy outputs are 1 if a slot's arg-max is right; the first 0 ends a block."""
    target, drafter = pair = tiny_pair(VOCAB, **{"k": 4} | SHAPES[shape])
    source, wrong, right = [7, 9, 12, EOS], 0, 0
    tokens = target.generate(torch.tensor([source]), max_new_tokens=9, do_sample=False)
    output = tokens[0, 1 if target.config.is_encoder_decoder else len(source) :].tolist()
    [[labelled]] = label_slots(labelling(pair, Sampling(), k=4), [ShardRow(0, source, output)])
    found = sorted(zip(labelled.positions.tolist(), labelled.acceptance.tolist(), strict=True))
    read = CachedModel(target).read(make_source(source, target))
    most = [4] * len(output)
    drafts = make_drafter(drafter, target)
    [known] = read_outputs(CachedModel(target), [read], [output], drafts.requires)
    found_along = run_single(teacher_forced_probs(drafts, known, most, Sampling()))
    expected = []
    for prefix, block in enumerate(found_along.tolist()):
        for place, own in enumerate(block[: len(output) - prefix], prefix):
            expected.append((place, own))
            if own == 0.0:
                wrong += 1
                break
            right += 1
    assert found == sorted(expected)
    assert wrong > 2 and (right > 1 or shape in ("paper", "bidirectional"))


@pytest.mark.parametrize("shape", ["coupled", "masks"])
def test_states_are_those_that_a_policy_is_shown(shape: str):
    """These are slot states before the token is known and without previous-token features."""
    target, drafter = pair = tiny_pair(VOCAB, **{"k": 3} | SHAPES[shape])
    output = [8, 20, 11, 6, 9]
    [[labelled]] = label_slots(labelling(pair, k=3), [ShardRow(0, SOURCE, output)])
    shown = []
    for prefix in range(5):
        source = make_source(SOURCE, target)
        session = make_drafter(drafter).open(source, Sampling(), None)
        tokens = torch.cat([source.prefix, torch.tensor(output[:prefix], dtype=torch.long)])
        shown.append(run_single(session.propose(tokens, None, FixedLength(3))).hidden)
    first = torch.stack([states[0] for states in shown]).float()
    assert labelled.positions[:5].tolist() == [0, 1, 2, 3, 4]  # first slots come first
    torch.testing.assert_close(labelled.hidden[:5], first, rtol=0, atol=1e-5)
    everything = torch.cat(shown).float()
    for state in labelled.hidden:
        assert (everything - state).abs().amax(-1).min() < 1e-5


def test_the_blocks_of_a_row_are_a_sample_of_its_own_numbers():
    numbers = np.array([0.4, 0.9, 0.1, 0.7])
    assert draw_prefixes(numbers, None) == draw_prefixes(numbers, 9) == [0, 1, 2, 3]
    assert draw_prefixes(numbers, 2) == [0, 2]
    assert draw_prefixes(numbers, None, 1) == draw_prefixes(numbers, 3, 1) == [1, 2, 3]


@pytest.mark.parametrize("family", ["marian", "llama"])
def test_a_cache_of_slots_is_built_and_read(family: str, tmp_path: Path, capsys):
    pair = make_pair(tmp_path, family)
    drafter = tiny_pair(VOCAB, k=3)[1]
    if family == "llama":
        drafter = masked_copy(MODELS["llama"](3), 3)
    drafter.save_pretrained(pair / "drafter")
    slots = {"k": 3, "state": "drawn"}
    config = settings(pair, **slots, mixes=2)
    manifest = build_cache(config)
    assert "slot states in 2 mixes" in capsys.readouterr().err
    assert (manifest.state, manifest.mixing, manifest.k) == ("slot", None, 3)
    assert manifest.drafter.model_type == ("llama" if family == "llama" else "marian")
    stored, outputs = columns(config.out), load_distilled(config.distilled)
    tokens = sum(map(len, outputs["target_ids"]))
    assert tokens < len(stored["rows"]) <= 3 * tokens
    assert (0 <= stored["acceptance"]).all() and (stored["acceptance"] <= 1).all()
    hidden, _ = open_cache(config.out).read(1, [4])
    assert hidden.shape[1] == manifest.hidden_size == 16
    few = settings(pair, "few", **slots, blocks_per_row=2)
    build_cache(few)
    per_row = torch.bincount(columns(few.out)["rows"])
    assert ((1 <= per_row) & (per_row <= 6)).all()  # an output of one token has one block
    with pytest.raises(ConfigError, match="k = 3, .*4"):
        build_cache(settings(pair, **slots | {"k": 4}, mixes=2))


def test_settings_of_other_states_are_named(tmp_path: Path) -> None:
    causal = MODELS["llama"](3)
    blocks, plain = masked_copy(causal, 3), {"state": "drawn"}
    for drafter, changes, message in (
        (blocks, {"state": "token"}, "state = 'token' counts for drafters of tok"),
        (causal, plain | {"blocks_per_row": 5}, "blocks_per_row = 5 counts for drafters"),
        (causal, plain | {"k": 3}, "k = 3 counts for drafters of blocks only"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_cache(settings(tmp_path, **changes), drafter.config, causal.config)
