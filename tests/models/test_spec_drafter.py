"""Spec-Drafter computes what its target computes, and every way of running it agrees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import DrafterConfig
from drafttrain.models.language_models import spread
from drafttrain.models.spec_drafter.initialise import initialise
from drafttrain.models.spec_drafter.model import SpecDrafter, SpecDrafterConfig
from drafttrain.models.spec_drafter.rows import PREFIX, Rows
from drafttrain.models.spec_drafter.shape import drafter_shape, has_own_output, make_config
from drafttrain.models.spec_drafter.slots import lay_out
from drafttrain.models.spec_drafter.told import as_long
from tests.comparing import close, same_weights
from tests.tiny_drafters import shared, tiny_drafter
from tests.tiny_models import FAMILIES, VOCAB, tiny_model

# T5 computes its norms and position buckets in float32, whatever the dtype
TOLERANCE = {"t5": 1e-5, "flan-t5": 1e-5}


@pytest.mark.parametrize("family", FAMILIES)
def test_drafter_of_equal_depth_computes_what_its_target_computes(family: str) -> None:
    target, drafter = shared(family), tiny_drafter(family, decoder_layers=2)
    ids, tokens = torch.randint(4, VOCAB, (2, 7)), torch.randint(4, VOCAB, (2, 6))
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    positions = torch.arange(6).expand(2, -1)
    rows = Rows(tokens, positions, torch.full_like(tokens, PREFIX), positions)
    with torch.no_grad():
        expected = target(input_ids=ids, attention_mask=mask, decoder_input_ids=tokens).logits
        logits = drafter.logits(drafter(ids, mask, rows))
    assert (logits - expected).abs().max() < TOLERANCE.get(family, 1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_slots_with_weights_of_their_own_start_as_those_without(family: str) -> None:
    alike = {"decoder_layers": 2, "previous_token_rank": 3}
    both, own = tiny_drafter(family, **alike), tiny_drafter(family, slot_weights="own", **alike)
    ids, targets = torch.randint(4, VOCAB, (1, 5)), torch.randint(4, VOCAB, (1, 6))
    layout = lay_out(targets, torch.tensor([6]), torch.tensor([[2, 4]]), own.config)
    with torch.no_grad():
        own.embedding.weight.copy_(both.embedding.weight)  # the mask's row is drawn
        expected = both(ids, None, layout.rows)
        hidden = own(ids, None, layout.rows, prefix_rows=layout.prefix_rows)
    assert (hidden - expected).abs().max() < TOLERANCE.get(family, 1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_slots_learn_a_token_predicts_as_the_target_does(family: str) -> None:
    target = shared(family)
    drafter = tiny_drafter(family, decoder_layers=2, slot_weights="own", previous_token_rank=3)
    for name, parameter in drafter.named_parameters():
        if ".slots." in name or name.startswith("previous_token"):
            torch.nn.init.normal_(parameter)
    ids, targets = torch.randint(4, VOCAB, (1, 5)), torch.randint(4, VOCAB, (1, 6))
    layout = lay_out(targets, torch.tensor([6]), torch.tensor([[2]]), drafter.config)
    start = torch.full((1, 1), drafter.config.decoder_start_token_id)
    with torch.no_grad():
        shifted = torch.cat((start, targets[:, :-1]), dim=1)
        expected = target(input_ids=ids, decoder_input_ids=shifted).logits
        hidden = drafter(ids, None, layout.rows, prefix_rows=layout.prefix_rows)
        found = drafter.logits(hidden, layout.previous)
    assert (layout.of_prefix(found) - expected).abs().max() < TOLERANCE.get(family, 1e-12)
    told = drafter.logits(hidden, layout.previous.clamp(max=VOCAB - 1))
    assert (layout.of_prefix(told) - expected).abs().max() > 1e-3  # the correction is shut off


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_accounted_for(family: str) -> None:
    target, config = shared(family), tiny_drafter(family, previous_token_rank=2).config
    account = initialise(SpecDrafter(config).double(), target, "both")
    assert all(name.startswith("previous_token") for name in account.missing)
    assert account.unexpected == []
    encoder_only = initialise(SpecDrafter(config).double(), target, "encoder")
    assert any(name.startswith("decoder.") for name in encoder_only.missing)
    assert not any(name.startswith("encoder.") for name in encoder_only.missing)


def test_target_with_two_embedding_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="shared table"):
        has_own_output(tiny_model("bart", tie_word_embeddings=False))


def test_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="spec-drafter"):
        drafter_shape(SpecDrafterConfig())


@pytest.mark.parametrize(
    ("own", "theirs", "expected"),
    [
        (3, 3, [0, 1, 2]),
        (12, 6, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),  # SpecDec: floor(i * 6 / 12)
        (2, 6, [0, 5]),
        (2, 3, [0, 2]),
        (1, 6, [5]),
    ],
)
def test_layers_are_spread_as_stated(own: int, theirs: int, expected: list[int]) -> None:
    assert spread(own, theirs) == expected


def test_anchored_rows_by_hand() -> None:
    """y = 5 6 7 1, k = 3, one block after y_1: masks stand at positions 2 and 3."""
    config = SpecDrafterConfig(vocab_size=10, k=3, mask_id=9, decoder_start_token_id=0)
    layout = lay_out(torch.tensor([[5, 6, 7, 1]]), torch.tensor([4]), torch.tensor([[1]]), config)
    assert layout.rows.tokens.tolist() == [[0, 5, 6, 7, 9, 9]]
    assert layout.rows.positions.tolist() == [[0, 1, 2, 3, 2, 3]]
    assert layout.labels.tolist() == [[5, 6, 7, 1, 7, 1]]
    assert layout.fill.tolist() == [[-1, -1, -1, -1, 6, 7]]
    assert layout.previous.tolist() == [[0, 5, 6, 7, 6, 7]]
    visible = layout.rows.visible(bidirectional=False)[0, 0].int().tolist()
    assert visible == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 1],  # a slot sees the start token, y_1 and its own block
        [1, 1, 0, 0, 1, 1],
    ]


def test_paper_rows_by_hand_with_masks_past_the_end() -> None:
    """y = 5 6 1, k = 3, a block after y_1: slots at positions 1 to 3, the last past EOS."""
    config = SpecDrafterConfig(
        vocab_size=10, k=3, mask_id=9, decoder_start_token_id=0, slots="paper"
    )
    layout = lay_out(torch.tensor([[5, 6, 1]]), torch.tensor([3]), torch.tensor([[1]]), config)
    assert layout.of_blocks(layout.rows.positions).tolist() == [[[1, 2, 3]]]
    assert layout.of_blocks(layout.labels).tolist() == [[[6, 1, -100]]]
    assert layout.of_blocks(layout.fill).tolist() == [[[6, 1, -1]]]
    assert layout.of_blocks(layout.previous)[0, 0, :2].tolist() == [5, 6]
    assert layout.of_prefix(layout.labels).tolist() == [[-100, -100, -100]]
    visible = layout.rows.visible(bidirectional=False)[0, 0].int()
    assert visible[3].tolist() == [1, 0, 0, 1, 1, 1]


def test_bidirectional_prefix_sees_the_block_and_nothing_after_the_prefix() -> None:
    config = SpecDrafterConfig(
        vocab_size=10,
        k=2,
        mask_id=9,
        decoder_start_token_id=0,
        slots="paper",
        prefix_attention="bidirectional",
    )
    layout = lay_out(torch.tensor([[5, 6, 7, 1]]), torch.tensor([4]), torch.tensor([[2]]), config)
    visible = layout.rows.visible(bidirectional=True)[0, 0].int()
    for row in (0, 1, 4, 5):
        assert visible[row].tolist() == [1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("slots", ["anchored", "paper"])
def test_a_block_among_many_equals_the_block_alone(slots: str) -> None:
    drafter = tiny_drafter("t5", slots=slots)
    ids, targets = torch.randint(4, VOCAB, (1, 5)), torch.randint(4, VOCAB, (1, 6))
    lengths, prefixes = torch.tensor([6]), torch.tensor([[0, 2, 5]])
    together = lay_out(targets, lengths, prefixes, drafter.config)
    with torch.no_grad():
        hidden = together.of_blocks(drafter(ids, None, together.rows))
        for i, prefix in enumerate(prefixes[0]):
            alone = lay_out(targets, lengths, prefix.view(1, 1), drafter.config)
            one = alone.of_blocks(drafter(ids, None, alone.rows))
            assert (hidden[:, i] - one[:, 0]).abs().max() < 1e-12


def test_padding_changes_nothing() -> None:
    drafter = tiny_drafter("bart")
    ids, targets = torch.randint(4, VOCAB, (2, 5)), torch.randint(4, VOCAB, (2, 6))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    lengths, prefixes = torch.tensor([3, 6]), torch.tensor([[1, -1], [2, 4]])
    layout = lay_out(targets, lengths, prefixes, drafter.config)
    alone = lay_out(targets[:1, :3], lengths[:1], prefixes[:1, :1], drafter.config)
    with torch.no_grad():
        padded = layout.of_blocks(drafter(ids, mask, layout.rows))[0, 0]
        bare = alone.of_blocks(drafter(ids[:1, :3], None, alone.rows))[0, 0]
    assert (padded - bare).abs().max() < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_drafter_loads_with_the_auto_class_and_computes_the_same(
    family: str, tmp_path: Path
) -> None:
    drafter = tiny_drafter(family, previous_token_rank=3)
    drafter.save_pretrained(tmp_path)
    assert [file.suffix for file in tmp_path.iterdir() if "model" in file.name] == [".safetensors"]
    loaded = AutoModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert same_weights(drafter, loaded)
    ids, targets = torch.randint(4, VOCAB, (1, 5)), torch.randint(4, VOCAB, (1, 6))
    layout = lay_out(targets, torch.tensor([6]), torch.tensor([[2]]), drafter.config)
    with torch.no_grad():
        for model in (drafter, loaded):
            model.expected = model.logits(model(ids, None, layout.rows), layout.previous)
    close(drafter.expected, loaded.expected, TOLERANCE.get(family, 1e-12))
    assert loaded.config.mask_id == VOCAB  # a row of its own, past the vocabulary


@pytest.mark.parametrize("slots", ["anchored", "paper"])
def test_slots_know_the_token_before_them_also_right_behind_the_end(slots: str) -> None:
    config = tiny_drafter(slots=slots).config
    layout = lay_out(
        torch.tensor([[5, 6, 1]]), torch.tensor([3]), torch.tensor([[0, 1, 2]]), config
    )
    shift = 1 if slots == "anchored" else 0  # the first slot of an anchored block is a prefix row
    sentence = [config.decoder_start_token_id, 5, 6, 1]  # what stands before places 0, 1, 2 and 3
    for prefix, previous in enumerate(layout.of_blocks(layout.previous)[0].tolist()):
        known = sentence[prefix + shift :]
        assert previous[: len(known)] == known[: len(previous)]


def test_a_state_is_corrected_by_the_direction_of_the_last_tokens_embedding() -> None:
    drafter = tiny_drafter("bart", previous_token_rank=3)
    torch.nn.init.normal_(drafter.previous_token_out.weight)
    hidden, tokens = torch.randn(2, drafter.config.d_model).double(), torch.tensor([5, 9])
    with torch.no_grad():
        drafter.embedding.weight[9] = 40 * drafter.embedding.weight[5]  # longer, not another way
        row = drafter.embedding.weight[5]
        told = drafter.previous_token_embedding.weight @ (row / row.square().mean().sqrt())
        gate = drafter.previous_token_hidden(hidden) + told
        correction = (gate * gate.sigmoid()) @ drafter.previous_token_out.weight.T
        expected = drafter.project(hidden + correction)
        assert (drafter.logits(hidden, tokens) - expected).abs().max() < 1e-4  # the norm's epsilon
        assert (drafter.logits(hidden, tokens.flip(0)) - expected).abs().max() < 1e-4
        assert (drafter.project(hidden) - expected).abs().max() > 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefix_attention": "bidirectional"}, "drafter.slots=paper"),
        ({"slot_weights": "own", "slots": "paper"}, "drafter.slots=anchored"),
        ({"feeds_first": True}, "drafter.slot_attention=causal"),
        (
            {"slot_attention": "causal", "prefix_attention": "bidirectional", "slots": "paper"},
            "drafter.slot_attention=bidirectional",
        ),
    ],
)
def test_impossible_shapes_are_refused_with_the_remedy(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpecDrafter(SpecDrafterConfig(d_model=16, attention_heads=2, **settings))


@pytest.mark.parametrize("family", ["marian", "t5"])
def test_narrower_drafter_keeps_the_size_of_its_heads(family: str) -> None:
    target = shared(family).config
    whole = make_config(target, DrafterConfig(initialise="none"), None)
    width = whole.d_model // 2
    half = make_config(target, DrafterConfig(initialise="none", d_model=width), None)
    assert (half.d_model, half.head_dim) == (width, whole.head_dim)
    assert half.attention_heads * 2 == whole.attention_heads and half.ffn_dim * 2 == whole.ffn_dim
    if whole.embedding_scale != 1.0:
        assert half.embedding_scale == pytest.approx(width**0.5)
    if whole.logit_scale != 1.0:
        assert half.logit_scale == pytest.approx(width**-0.5)
    tokens = torch.tensor([[4, 5, 1]])
    assert SpecDrafter(half).encode(tokens).keys_values[0][0].shape[-1] == whole.head_dim


@pytest.mark.parametrize("family", ["marian", "t5"])
def test_heads_and_feed_forward_layers_are_what_was_asked_for(family: str) -> None:
    target = shared(family).config
    asked = {"d_model": 24, "attention_heads": 6, "ffn_dim": 40, "initialise": "none"}
    config = make_config(target, DrafterConfig(**asked), None)
    assert (config.d_model, config.attention_heads, config.head_dim) == (24, 6, 4)
    assert SpecDrafter(config).encoder.layers[0].feed_forward.up.weight.shape == (40, 24)
    with pytest.raises(ConfigError, match="ffn_dim = 40 is not the target's 32"):
        make_config(target, DrafterConfig(ffn_dim=40), None)
    with pytest.raises(ConfigError, match="attention_heads = 5 does not divide the width 24"):
        make_config(target, DrafterConfig(**asked | {"attention_heads": 5}), None)


def test_another_width_than_the_targets_cannot_start_from_its_weights() -> None:
    target = shared("marian").config
    with pytest.raises(ConfigError, match="d_model.*initialise=both; set it to none"):
        make_config(target, DrafterConfig(d_model=target.d_model // 2), None)
    with pytest.raises(ConfigError, match="whole heads"):
        make_config(target, DrafterConfig(d_model=target.d_model + 1, initialise="none"), None)


def test_states_are_as_long_as_what_they_stand_beside() -> None:
    """Numbers of the same root mean square, however large a family's are; nothing stays nothing."""
    states, embedded = torch.randn(2, 3, 12).double(), 0.1 * torch.randn(2, 3, 5).double()
    states[0, 1] = 0.0
    found = as_long(states, embedded)
    assert not found[0, 1].any()
    shares = [one.square().mean(-1).sqrt() for one in (found, embedded)]
    there = states.abs().sum(-1) > 0
    assert torch.allclose(*(share[there] for share in shares))
    assert torch.allclose(as_long(1000.0 * states, embedded), found)
    assert (torch.nn.functional.cosine_similarity(found, states, dim=-1)[there] > 0.999).all()


def test_a_drafter_of_few_tokens_scores_those_as_one_of_all_does(tmp_path: Path) -> None:
    whole = tiny_drafter("marian", previous_token_rank=3)
    few = tiny_drafter("marian", previous_token_rank=3, output_tokens=5)
    chosen = torch.tensor([1, 4, 9, 20, 33])
    few.draftable.copy_(chosen)
    few.load_state_dict(whole.state_dict() | {"draftable": chosen})
    hidden = torch.randn(2, 3, whole.config.d_model, dtype=torch.float64)
    previous = torch.randint(0, VOCAB, (2, 3))
    found, expected = few.logits(hidden, previous), whole.logits(hidden, previous)
    assert found.shape == expected.shape
    assert (found[..., chosen] - expected[..., chosen]).abs().max() < 1e-12
    assert found.softmax(-1)[..., chosen].sum(-1).sub(1).abs().max() < 1e-12
    assert (
        few.project(hidden)[..., chosen] - whole.project(hidden)[..., chosen]
    ).abs().max() < 1e-9
    few.save_pretrained(tmp_path)
    again = SpecDrafter.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(again.draftable, chosen)
    assert torch.equal(again.logits(hidden, previous), found)


def test_labels_that_cannot_be_drafted_are_ignored() -> None:
    few = tiny_drafter("marian", output_tokens=3)
    few.draftable.copy_(torch.tensor([1, 4, 9]))
    labels = torch.tensor([[9, 5, -100], [1, 4, 0]])
    assert few.draftable_labels(labels, -100).tolist() == [[2, -100, -100], [0, 1, -100]]
    assert tiny_drafter("marian").draftable_labels(labels, -100) is labels


def test_more_draftable_tokens_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="drafter.output_tokens = 99 is more than the target's"):
        make_config(tiny_model("bart").config, DrafterConfig(output_tokens=99), None)
