"""Multilingual targets: sources are marked, and outputs begin with the requested language."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from drafttrain.config.base import ConfigError
from drafttrain.models.languages import language_tokens
from drafttrain.models.loading import load_target, load_tokenizer
from tests.tiny_languages import LANGUAGES, save_language_target
from tests.tiny_targets import target_at


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("languages")
    return {kind: save_language_target(kind, root / kind) for kind in LANGUAGES}


def both(kind: str) -> dict[str, str]:
    return dict(zip(("source_language", "target_language"), LANGUAGES[kind], strict=True))


@pytest.mark.parametrize("kind", LANGUAGES)
def test_sources_are_marked_and_the_first_token_is_forced(kind, targets, tmp_path):
    source, output = LANGUAGES[kind]
    target = load_target(target_at(targets[kind], **both(kind)))
    ids = target.tokenizer("w5 w12")["input_ids"]
    theirs = AutoTokenizer.from_pretrained(targets[kind], src_lang=source)
    assert ids == theirs("w5 w12")["input_ids"]
    tokens = language_tokens(target.tokenizer)
    assert tokens[source] in ids
    assert target.model.generation_config.forced_bos_token_id == tokens[output]
    other = load_tokenizer(target_at(targets[kind], source_language=output, target_language=source))
    assert other("w5 w12")["input_ids"] != ids
    target.tokenizer.save_pretrained(tmp_path)  # a drafter's folder keeps the source language
    assert AutoTokenizer.from_pretrained(tmp_path)("w5 w12")["input_ids"] == ids


@pytest.mark.parametrize("kind", LANGUAGES)
def test_unknown_and_missing_languages_are_refused_with_the_nearest_code(kind, targets):
    folder, known = targets[kind], both(kind)
    for field, code in known.items():
        wrong = known | {field: code[:2] + "q"}
        with pytest.raises(ConfigError, match=f"target.{field} = '{code[:2]}q' is not one of the"):
            load_tokenizer(target_at(folder, **wrong))
        with pytest.raises(ConfigError, match=f"target.{field} is missing: .*target.{field}="):
            load_tokenizer(target_at(folder, **known | {field: None}))
    if near := {"nllb": "deu_Latn", "mbart50": "de_DE"}.get(kind):
        with pytest.raises(ConfigError, match=f"did you mean '{near}'"):
            load_tokenizer(target_at(folder, **known | {"source_language": "de"}))


def test_settings_in_the_targets_files_need_not_be_given(targets, tmp_path):
    folder = Path(shutil.copytree(targets["mbart50"], tmp_path / "own"))
    file, generation = folder / "tokenizer_config.json", folder / "generation_config.json"
    output = language_tokens(AutoTokenizer.from_pretrained(folder))["ro_RO"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"src_lang": "fr_XX"}))
    own = json.loads(generation.read_text())
    for name in ("forced_bos_token_id", "decoder_start_token_id"):
        generation.write_text(json.dumps(own | {name: output}))
        target = load_target(target_at(folder))
        assert target.tokenizer.src_lang == "fr_XX"
        assert getattr(target.model.generation_config, name) == output


@pytest.mark.parametrize("field", ["source_language", "target_language"])
def test_languages_of_a_target_without_any_are_refused(field, tiny_target):
    with pytest.raises(ConfigError, match=f"target.{field} = 'de' is for targets whose tokenizer"):
        load_target(target_at(tiny_target, **{field: "de"}))
