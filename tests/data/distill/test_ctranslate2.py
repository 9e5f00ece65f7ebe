"""CTranslate2 as what decodes: the same rows and the same account, and the manifest says so."""

from __future__ import annotations

import json

import pytest

from drafttrain.commands.distill import check_backend, open_decoder
from drafttrain.config.base import ConfigError
from drafttrain.data.distill import distill as distillation
from drafttrain.data.shards.outputs import load_distilled, read_manifest
from drafttrain.decoding.ctranslate2.translate import translate_checked
from drafttrain.models.loading import load_target
from tests.data.distill.tiny_distill import rows_of, settings
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target

pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed (it is in the dev extra)")

CTRANSLATE2 = {"backend": "ctranslate2"}


def distill(config, target=None):
    """As the command does it, or a recipe with its target."""
    check_backend(config)
    return distillation.distill(config, target, open_decoder)


def test_greedy_rows_and_their_account_are_those_of_transformers(tiny_target):
    own = distill(settings(tiny_target))
    other = distill(settings(tiny_target, "other", **CTRANSLATE2))
    assert rows_of(tiny_target.parent / "other") == rows_of(tiny_target.parent / "out")
    assert other.counts == own.counts and own.counts.truncated > 0
    assert (own.backend, other.backend) == ("transformers", "ctranslate2")
    assert other.versions.keys() - own.versions.keys() == {"ctranslate2"}


def test_beams_are_searched(tiny_target):
    """With early stopping both libraries end a search at the same place."""
    file = tiny_target / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"early_stopping": True}))
    beams = {"method": "beam", "num_beams": 3}
    distill(settings(tiny_target, **beams))
    distill(settings(tiny_target, "other", **beams, **CTRANSLATE2))
    own, other = (load_distilled(tiny_target.parent / name) for name in ("out", "other"))
    same = [a == b for a, b in zip(own["target_ids"], other["target_ids"], strict=True)]
    assert sum(same) >= 0.8 * len(same)


def test_a_folder_goes_on_with_the_backend_that_began_it_only(tiny_target):
    config = settings(tiny_target)
    distill(config)
    next(config.out.glob("*.parquet")).unlink()
    with pytest.raises(ConfigError, match="backend"):
        distill(settings(tiny_target, **CTRANSLATE2))


def test_a_manifest_of_earlier_versions_is_of_transformers(tiny_target):
    config = settings(tiny_target)
    distill(config)
    file = config.out / "manifest.json"
    values = json.loads(file.read_text())
    del values["backend"]
    file.write_text(json.dumps(values))
    assert read_manifest(config.out).backend == "transformers"
    assert distill(config).counts.ok == 20


SAMPLED = {"method": "sample", "sampling": {"max_new_tokens": 12, "temperature": 1.0}}


def test_sampling_is_refused_before_anything_is_written(tiny_target):
    config = settings(tiny_target, **SAMPLED, **CTRANSLATE2)
    with pytest.raises(ConfigError, match="'sample', but backend 'ctranslate2' .*backend=transf"):
        distill(config)
    assert not config.out.exists()


def test_decoder_only_targets_are_refused(tmp_path):
    target = save_target(tiny_model("llama"), tmp_path / "target")
    config = settings(target, **CTRANSLATE2)
    with pytest.raises(ConfigError, match="a 'llama' model cannot be converted"):
        check_backend(config)
    with pytest.raises(ConfigError, match="a 'llama' model cannot be converted"):
        open_decoder(config, load_target(config.target))
    assert not config.out.exists()


def test_what_the_target_asks_for_and_is_not_honoured_is_refused(tiny_target):
    file = tiny_target / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 1.5}))
    config = settings(tiny_target, **CTRANSLATE2)
    with pytest.raises(ConfigError, match="asks for a RepetitionPenaltyLogitsProcessor"):
        distill(config)
    assert not (config.out / "manifest.json").exists()


def test_a_batch_too_large_for_memory_is_decoded_in_halves(tiny_target, monkeypatch):
    def failing(translator, sources, how):
        if len(sources) > 1:
            raise RuntimeError("CUDA failed with error out of memory")
        return translate_checked(translator, sources, how)

    distill(settings(tiny_target))
    monkeypatch.setattr("drafttrain.data.distill.ctranslate2.translate_checked", failing)
    distill(settings(tiny_target, "other", **CTRANSLATE2))
    assert rows_of(tiny_target.parent / "other") == rows_of(tiny_target.parent / "out")
