"""What an export is for: a fresh process decodes with it, and the output is the target's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafttrain.config.inputs import TargetConfig
from drafttrain.export.verify import Check, in_fresh_process, load_written, verify
from tests.export.pairs import export_to, noisy_copy, save_drafter, save_head, save_spec_drafter
from tests.tiny_models import tiny_model
from tests.tiny_targets import random_sentences, save_target, tiny_tokenizer

SENTENCES = random_sentences(6)


@pytest.fixture(scope="module", params=["marian", "llama"])
def pair(request, tmp_path_factory) -> tuple[str, Path]:
    """A target on disk, and an export of a drafter for it."""
    family, root = request.param, tmp_path_factory.mktemp(request.param)
    model = tiny_model(family).float()
    target = save_target(model, root / "target")
    if family == "marian":
        drafter = save_spec_drafter(root / "drafter", model, target)
        return str(target), export_to(root / "export", drafter=str(drafter))
    drafter = save_drafter(root / "drafter", family, torch.float32)
    head = save_head(root / "head", noisy_copy(family).float())
    return str(target), export_to(root / "export", drafter=str(drafter), head=head)


def test_a_fresh_process_decodes_with_the_folder_what_the_target_decodes_alone(pair):
    target, export = pair
    inputs = [tiny_tokenizer()(sentence).input_ids[:-1] for sentence in SENTENCES]
    found = verify(
        export, load_written(export), Check(inputs, TargetConfig(path=target)), in_fresh_process
    )
    assert (found.drafted, found.decoded, found.ties) == (6, 6, 0)
