"""Spec-Drafters are models of their target's family: computation, initialisation, saving."""

from importlib.metadata import version

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import DrafterConfig, ObjectiveConfig
from drafttrain.data.batches.examples import Example
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.spec_drafter import RowReader
from drafttrain.models.drafters import check_fit, vocabulary_size
from drafttrain.models.language_models import spread
from drafttrain.models.spec_drafter.build import build, depths, make_config
from drafttrain.models.spec_drafter.layout import PREFIX, Layout, Rows, lay_out
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.models.spec_drafter.shape import DraftShape, shape_of
from drafttrain.training.objectives.mask_predict import MaskPredict
from tests.comparing import close, same_weights
from tests.tiny_drafters import collator, drafter_of, shared, tiny_drafter
from tests.tiny_models import FAMILIES, VOCAB, tiny_model, tiny_seq2seq

OTHERS = ("m2m100", "blenderbot", "led", "mt5", "umt5", "t5gemma", "two vocabularies")
# T5 computes its norms and position buckets in float32, whatever the dtype
TOLERANCE = dict.fromkeys(FAMILIES, 1e-12) | dict.fromkeys(("t5", "flan-t5", *OTHERS), 1e-5)


def target_of(family: str) -> PreTrainedModel:
    return tiny_seq2seq(family) if family in OTHERS else shared(family)


def read(drafter: SpecDrafter, ids: Tensor, mask: Tensor | None, rows: Rows) -> Tensor:
    reader = RowReader(drafter)
    return reader(rows, reader.encode(ids, mask)).hidden


def block_after(drafter: SpecDrafter, targets: Tensor, *prefixes: int) -> Layout:
    lengths = torch.full((len(targets),), targets.shape[1])
    start = drafter.config.decoder_start_token_id
    at = torch.tensor([prefixes])
    return lay_out(targets, lengths, at, drafter.shape, drafter.config.k, start)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_drafter_of_equal_depth_equals_its_target(family):
    target = target_of(family)
    if family == "umt5" and version("transformers") < "5.16":  # its decoder is not causal there
        with pytest.raises(ValueError, match="later tokens"):
            CachedModel(target)
        return
    drafter = drafter_of(target, decoder_layers=2)
    ids, tokens = torch.randint(4, 30, (2, 7)), torch.randint(4, 30, (2, 6))
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    positions = torch.arange(6).expand(2, -1)
    rows = Rows(tokens, positions, torch.full_like(tokens, PREFIX), positions)
    with torch.no_grad():
        expected = target(input_ids=ids, attention_mask=mask, decoder_input_ids=tokens).logits
        logits = drafter.logits(read(drafter, ids, mask, rows))
    assert (logits - expected).abs().max() < TOLERANCE[family]


def test_layers_are_spread_as_stated():
    assert spread(12, 6) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]  # SpecDec: floor(i * 6 / 12)
    pairs = [(3, 3), (2, 6), (2, 3), (1, 6), (0, 6)]
    assert [spread(*pair) for pair in pairs] == [[0, 1, 2], [0, 5], [0, 2], [5], []]


def rows_of(output: list[int], prefix: int, k: int = 3, **shape: str) -> Layout:
    """Lays out a block after `prefix` tokens of an output; token 9 is the mask, 0 the start."""
    targets, lengths = torch.tensor([output]), torch.tensor([len(output)])
    return lay_out(targets, lengths, torch.tensor([[prefix]]), DraftShape(9, 10, **shape), k, 0)


def test_anchored_rows_by_hand():
    """y = 5 6 7 1, k = 3, one block after y_1: masks are at positions 2 and 3."""
    layout = rows_of([5, 6, 7, 1], 1)
    assert layout.rows.tokens.tolist() == [[0, 5, 6, 7, 9, 9]]
    assert layout.rows.positions.tolist() == [[0, 1, 2, 3, 2, 3]]
    assert layout.labels.tolist() == [[5, 6, 7, 1, 7, 1]]
    assert layout.fill.tolist() == [[-1, -1, -1, -1, 6, 7]]
    assert layout.previous.tolist() == [[0, 5, 6, 7, 6, 7]]
    assert layout.rows.visible(DraftShape(9, 10))[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 1],  # a slot attends to the start token, y_1 and its block
        [1, 1, 0, 0, 1, 1],
    ]


def test_paper_rows_by_hand_with_masks_past_the_end():
    """y = 5 6 1, k = 3, a block after y_1: slots at positions 1 to 3, the last past EOS."""
    layout = rows_of([5, 6, 1], 1, slots="paper")
    assert layout.of_blocks(layout.rows.positions).tolist() == [[[1, 2, 3]]]
    assert layout.of_blocks(layout.labels).tolist() == [[[6, 1, -100]]]
    assert layout.of_blocks(layout.fill).tolist() == [[[6, 1, -1]]]
    assert layout.of_blocks(layout.previous)[0, 0, :2].tolist() == [5, 6]
    assert layout.of_prefix(layout.labels).tolist() == [[-100, -100, -100]]
    visible = layout.rows.visible(DraftShape(9, 10, "paper"))[0].int()
    assert visible[3].tolist() == [1, 0, 0, 1, 1, 1]


def test_bidirectional_prefix_sees_the_block_and_nothing_after_the_prefix():
    shape = {"slots": "paper", "prefix_attention": "bidirectional"}
    visible = rows_of([5, 6, 7, 1], 2, 2, **shape).rows.visible(DraftShape(9, 10, **shape))[0].int()
    assert visible[[0, 1, 4, 5]].tolist() == [[1, 1, 0, 0, 1, 1]] * 4
    with pytest.raises(ValueError, match="drafter.slots=paper"):  # anchored slots cannot have it
        DraftShape(9, 10, prefix_attention="bidirectional")


def test_one_slot_after_a_kept_prefix_is_read_as_with_it():
    """LED ignores the mask of a single token, which here hides the tokens after the prefix."""
    drafter = drafter_of(tiny_seq2seq("led"), k=2)
    ids, targets = torch.randint(4, VOCAB, (1, 5)), torch.randint(4, VOCAB, (1, 6))
    layout, reader = block_after(drafter, targets, 2), RowReader(drafter)
    rows, start = layout.rows, layout.prefix_rows
    with torch.no_grad():
        encoded = reader.encode(ids, None)
        prefix = reader(rows.part(0, start), encoded, keep=True)
        apart = reader(rows.part(start), encoded, prefix).hidden
        close(apart, reader(rows, encoded).hidden[:, start:])


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_layers_are_copied_and_the_saved_drafter_is_loaded_by_us_and_by_its_family(
    family, tmp_path
):
    target, layers = target_of(family), {"encoder_layers": 3, "decoder_layers": 1}
    settings = DrafterConfig(previous_token_rank=3, **layers)
    config, size = make_config(target.config, settings, None), vocabulary_size(target.config)
    drafter, copied = build(config, target, "both", target.dtype)
    every = {name for name, one in drafter.named_parameters() if one.requires_grad}
    assert depths(config) == (3, 1)
    assert all(name.startswith("previous_token") for name in every - {*copied})
    of_encoder = build(config, target, "encoder", target.dtype)[1]
    assert any(".decoder." in f".{name}" for name in every - {*of_encoder})
    assert not any(".encoder." in f".{name}" for name in every - {*of_encoder})
    mask = drafter.embed_tokens.weight  # a separate row, initially the mean of the others
    assert len(mask) == size + 1
    close(mask[size], target.get_decoder().embed_tokens.weight.float().mean(0).to(mask))

    torch.nn.init.normal_(drafter.previous_token.out.weight)
    drafter.eval().save_pretrained(tmp_path)
    assert [file.suffix for file in tmp_path.iterdir() if "model" in file.name] == [".safetensors"]
    reports = {"output_loading_info": True}
    loaded, report = SpecDrafter.from_pretrained(tmp_path, dtype=target.dtype, **reports)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert same_weights(drafter, loaded.eval())
    ids, targets = torch.randint(4, 30, (1, 5)), torch.randint(4, 30, (1, 6))
    layout = block_after(drafter, targets, 2)
    with torch.no_grad():
        found, expected = (
            model.logits(read(model, ids, None, layout.rows), layout.previous)
            for model in (loaded, drafter)
        )
    close(found, expected, 1e-12 if family in FAMILIES else 1e-5)
    plain, report = type(target).from_pretrained(tmp_path, **reports)
    assert all(name.startswith("previous_token.") for name in report["unexpected_keys"])
    assert type(plain).__name__ == type(drafter).__name__


@pytest.mark.parametrize("slots", ["anchored", "paper"])
def test_slots_have_the_previous_token_also_right_after_the_end(slots):
    drafter = tiny_drafter(slots=slots)
    layout = block_after(drafter, torch.tensor([[5, 6, 1]]), 0, 1, 2)
    shift = 1 if slots == "anchored" else 0  # the first slot of an anchored block is a prefix row
    sentence = [drafter.config.decoder_start_token_id, 5, 6, 1]  # before positions 0, 1, 2 and 3
    for prefix, previous in enumerate(layout.of_blocks(layout.previous)[0].tolist()):
        known = sentence[prefix + shift :]
        assert previous[: len(known)] == known[: len(previous)]


def test_a_state_is_corrected_by_the_direction_of_the_last_tokens_embedding():
    drafter = tiny_drafter("bart", previous_token_rank=3)
    features, table = drafter.previous_token, drafter.embed_tokens.weight
    torch.nn.init.normal_(features.out.weight)
    hidden, tokens = torch.randn(2, drafter.width).double(), torch.tensor([5, 9])
    with torch.no_grad():
        table[9] = 40 * table[5]  # longer, same direction
        embedded = features.embedding.weight @ (table[5] / table[5].square().mean().sqrt())
        gate = features.hidden(hidden) + embedded
        correction = (gate * gate.sigmoid()) @ features.out.weight.T
        expected = drafter.logits(hidden + correction)
        assert (drafter.logits(hidden, tokens) - expected).abs().max() < 1e-4  # the norm's epsilon
        assert (drafter.logits(hidden, tokens.flip(0)) - expected).abs().max() < 1e-4
        assert (drafter.logits(hidden) - expected).abs().max() > 0.1


def test_a_drafter_of_another_version_is_refused_by_the_entry_it_has(tmp_path):
    drafter = tiny_drafter()
    drafter.config.spec_drafter |= {"fused_layer": 2}
    drafter.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"spec_drafter\.fused_layer in the drafter's config"):
        SpecDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("t5", {"overrides": {"ffn": 3}}, "drafter.overrides.ffn is not a field"),
        ("t5", {"overrides": {"k": 3}}, "drafter.overrides.k is not a field"),
        ("t5", {"overrides": {"d_model": "wide"}}, r"wide.* gives no model \("),
        ("t5", {"overrides": {"d_model": -8}}, "gives no model"),
        ("bart", {"overrides": {"encoder_attention_heads": 7}}, "gives no model"),
        ("bart", {"overrides": {"vocab_size": 3}}, "overrides.vocab_size: drafter and target must"),
        ("bart", {"overrides": {"pad_token_id": 7}}, "must agree"),
        ("whisper", {"encoder": "own"}, "drafter.encoder = 'own', but the inputs .* are audio"),
        ("bart", {"encoder": "target", "encoder_layers": 2}, "drafter.encoder_layers = 2 is for"),
        ("bart", {"source_pooling": 2}, "drafter.source_pooling = 2 averages"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_before_anything_is_made(family, settings, named):
    with pytest.raises(ConfigError, match=named):
        make_config(tiny_model(family).config, DrafterConfig(**settings), None)


def test_other_sizes_than_the_targets_are_fields_of_its_family():
    sizes = {"d_model": 24, "num_heads": 6, "d_ff": 40}
    config = make_config(shared("t5").config, DrafterConfig(overrides=sizes), None)
    assert sizes == {name: getattr(config, name) for name in sizes}


def test_a_drafter_of_few_tokens_scores_those_as_one_of_all_does(tmp_path):
    chosen = torch.tensor([1, 4, 9, 20, 33])
    whole = tiny_drafter("marian", previous_token_rank=3)
    few = tiny_drafter("marian", previous_token_rank=3, draftable=chosen.tolist())
    hidden = torch.randn(2, 3, whole.width, dtype=torch.float64)
    previous = torch.randint(0, VOCAB, (2, 3))
    found, expected = few.logits(hidden, previous), whole.logits(hidden, previous)
    assert found.shape == expected.shape
    assert (found[..., chosen] - expected[..., chosen]).abs().max() < 1e-12
    assert found.softmax(-1)[..., chosen].sum(-1).sub(1).abs().max() < 1e-12
    assert (few.logits(hidden)[..., chosen] - whole.logits(hidden)[..., chosen]).abs().max() < 1e-9
    few.save_pretrained(tmp_path)
    again = SpecDrafter.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(again.draftable, chosen)
    assert torch.equal(again.logits(hidden, previous), found)
    labels = torch.tensor([[9, 5, -100], [1, 4, 0]])  # others cannot be drafted and are ignored
    assert few.draftable_labels(labels, -100).tolist() == [[2, -100, -100], [0, 1, -100]]
    assert whole.draftable_labels(labels, -100) is labels


def test_audio_is_read_by_the_targets_encoder_and_texts_by_an_own_one_that_is_trained():
    assert tiny_drafter("bart").shape.encoder == "own"
    drafter = tiny_drafter("whisper")
    assert shape_of(drafter.config).encoder == "target"
    trained = {name for name, one in drafter.named_parameters() if one.requires_grad}
    assert trained and not any(".encoder." in name for name in trained)
    assert depths(tiny_model("whisper").config) == (2, 2) and depths(drafter.config)[0] == 0


@pytest.mark.parametrize("family", ["bart", "led"])
def test_each_trained_parameter_gets_a_gradient(family):
    """DDP waits for all of them; BART here has separate embeddings, LED global attention."""
    drafter = drafter_of(tiny_model("bart") if family == "bart" else target_of(family))
    examples = [Example(0, 0, [5, 6, 7], [8, 9, 1]), Example(0, 1, [10], [11, 1])]
    MaskPredict(drafter, ObjectiveConfig())(collator(drafter, 2)(examples), 0.0).loss.backward()
    assert not [n for n, p in drafter.named_parameters() if p.requires_grad and p.grad is None]


@pytest.mark.parametrize("family", ["bart", "t5gemma"])
def test_an_encoder_of_another_width_is_refused(family):
    target = target_of(family).config
    drafter = make_config(target, DrafterConfig(encoder="target"), 3)
    check_fit(drafter, target, "drafter 'd'", "target 't'")
    getattr(drafter, "encoder", drafter).hidden_size = 99
    with pytest.raises(ConfigError, match="encoder states of size 99"):
        check_fit(drafter, target, "drafter 'd'", "target 't'")
