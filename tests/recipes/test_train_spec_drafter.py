"""The recipe end to end on tiny targets; tests/faults kills it and runs it again."""

import pytest
import torch

from drafttrain import load
from drafttrain.data.shards.outputs import load_distilled
from drafttrain.models.spec_drafter.model import SpecDrafter
from recipes.train_spec_drafter import main
from tests.commanding import exit_code
from tests.recipes.tiny_recipe import exported, trained_once, write_recipe
from tests.tiny_drafters import shared
from tests.tiny_families import SEQ2SEQ
from tests.tiny_models import tiny_seq2seq
from tests.tiny_targets import save_target

NEW = 8
"""Tokens of an output."""


def settings(**training: int) -> dict[str, dict]:
    return {
        "distill": {"sampling": {"max_new_tokens": NEW}},
        "drafter": {"k": 4, "decoder_layers": 1, "encoder_layers": 3},
        "train": {"max_steps": 3, "batch_tokens": 400, "threads": 1} | training,
    }


@pytest.mark.parametrize("family", ["led", *SEQ2SEQ[1:], "t5gemma", "two vocabularies"])
def test_any_family_of_encoder_decoders_is_drafted_for(family, tmp_path, own_modules, capsys):
    """Trained for a few steps, loaded and exported, and exact when decoding. M2M100 and mBART-50
    are tested in tests/commands/test_languages.py."""
    target = tiny_seq2seq(family).float()
    save_target(target, tmp_path / "target")
    assert exit_code(main, "--config", write_recipe(tmp_path, 12, 3, **settings())) == 0
    decoder = load(str(tmp_path / "target"), drafter=str(tmp_path / "run" / "final"), k=4)
    ids = [[5, 9, 20, 7, 1], [4, 30, 1]]
    for batch_size in (1, 2):
        outputs = decoder.generate(ids, max_new_tokens=NEW, batch_size=batch_size)
        for source, found in zip(ids, outputs, strict=True):
            expected = target.generate(torch.tensor([source]), max_new_tokens=NEW, do_sample=False)
            assert list(found.tokens) == expected[0, 1:].tolist()
    exported(tmp_path / "run", capsys)


def test_tokens_that_outputs_use_can_be_drafted(tmp_path, capsys):
    """These are the tokens of the distilled outputs and EOS."""
    save_target(shared("marian"), tmp_path / "target")
    file = write_recipe(tmp_path, 20, 4, **settings(max_steps=1, batch_tokens=20))
    run, few = tmp_path / "run", "drafter.output_tokens=used"
    printed = trained_once(main, ["--config", file, few], run, capsys)
    outputs = load_distilled(run / "distilled")["target_ids"]
    used = {token for tokens in outputs for token in tokens}
    drafter = SpecDrafter.from_pretrained(run / "final")
    used.add(drafter.config.eos_token_id)
    assert drafter.draftable.tolist() == sorted(used)
    assert 1 < len(used) < drafter.shape.vocab_size
    assert f"{len(used)} of {drafter.shape.vocab_size} tokens can be drafted" in printed
    assert "rows are longer than train.batch_tokens=20" in printed
