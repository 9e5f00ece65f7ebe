"""Whole commands with multilingual targets: outputs are those of `generate` in each language."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import drafttrain
from drafttrain.commands.export import export
from drafttrain.config.commands import ExportConfig
from drafttrain.data.shards.outputs import load_distilled
from drafttrain.export.generation import generate
from drafttrain.export.verify import compare
from drafttrain.models.languages import language_tokens
from recipes.train_spec_drafter import main
from tests.commanding import ended, exit_code
from tests.recipes.tiny_recipe import QUICK, write_recipe
from tests.tiny_languages import LANGUAGES, save_language_target

TEXTS = ["w5 w6 w17", "w30"]
NEW = 8


@pytest.fixture(params=LANGUAGES)
def kind(request) -> str:
    return request.param


@pytest.fixture
def run(kind, tmp_path) -> Path:
    """Trains a Spec-Drafter for a few steps and returns its run."""
    target = save_language_target(kind, tmp_path / "target")
    source, output = LANGUAGES[kind]
    languages = {"source_language": source, "target_language": output}
    file = write_recipe(
        tmp_path,
        20,
        4,
        target={"path": str(target)} | languages,
        distill={"sampling": {"max_new_tokens": NEW}},
        drafter={"k": 4, "decoder_layers": 1},
        train={"max_steps": 20, "batch_tokens": 400, "warmup": 1, "threads": 1},
    )
    assert exit_code(main, "--config", str(file)) == 0
    return tmp_path / "run"


def test_every_command_decodes_in_the_languages_of_the_run(kind, run, tmp_path, capsys):
    source, output = LANGUAGES[kind]
    path = str(tmp_path / "target")
    target = AutoModelForSeq2SeqLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path, src_lang=source)
    first = language_tokens(tokenizer)[output]
    inputs = [tokenizer(text, return_tensors="pt") for text in TEXTS]
    forced = {"forced_bos_token_id": first, "max_new_tokens": NEW, "do_sample": False}
    expected = [target.generate(**one, **forced)[0, 1:].tolist() for one in inputs]
    assert all(tokens[0] == first for tokens in expected)

    rows = load_distilled(run / "distilled")
    assert {tokens[0] for tokens in rows["target_ids"]} == {first}
    assert all(language_tokens(tokenizer)[source] in ids for ids in rows["source_ids"])
    languages = {"source_language": source, "target_language": output}
    written = yaml.safe_load((run / "run.yaml").read_text())["target"]
    final = json.loads((run / "final" / "config.json").read_text())["target"]
    manifest = json.loads((run / "distilled" / "manifest.json").read_text())
    for recorded in (written, final, manifest["settings"]["target"]):
        assert languages.items() <= recorded.items()

    shutil.copytree(run / "final", tmp_path / "alone")  # found by config.json, without run.yaml
    arguments = [f"--text={text}" for text in TEXTS] + ["--json", "--max-new-tokens", NEW]
    given = ["--target", path, *(f"target.{name}={code}" for name, code in languages.items())]
    capsys.readouterr()
    for how in ([run], [tmp_path / "alone"], [run, *given], ["max-gram", *given]):
        assert ended("generate", "--drafter", *how, *arguments) == 0
        found = [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()]
        assert found == expected
    decoder = drafttrain.load(path, drafter=str(run / "final"), **languages)
    assert [one.tokens for one in decoder.generate(TEXTS, max_new_tokens=NEW)] == expected

    assert ended("eval", "--drafter", run, *QUICK, "baselines=[generate]") == 0
    report = json.loads((run / "report.json").read_text())
    assert all(one["metrics"]["identical"]["value"] == 1.0 for one in report["runs"][1:])
    few = ["minutes=0.02", "--max-new-tokens", NEW]
    assert ended("tune", "--drafter", run, "--dry-run", *few) == 0
    capsys.readouterr()
    assert ended("generate", "--drafter", "max-gram", "--target", path, *arguments) == 2
    assert "target.source_language is missing" in capsys.readouterr().err


def test_an_export_decodes_in_these_languages(kind, run, tmp_path, own_modules, capsys):
    source, output = LANGUAGES[kind]
    export(ExportConfig(drafter=str(run), out=tmp_path / "out"), reload=compare)
    assert "the target's output unchanged for 4 inputs" in capsys.readouterr().out
    target = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")  # marks sources as in training
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    token = language_tokens(tokenizer)[output]
    forced = {"forced_bos_token_id": token, "max_new_tokens": NEW, "do_sample": False}
    found = generate(target, **inputs, **forced, assistant_model=str(tmp_path / "out"))
    expected = target.generate(**inputs, **forced)
    assert torch.equal(found, expected)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f'src_lang="{source}"' in card
    name = tokenizer.convert_ids_to_tokens(token)
    assert f'forced_bos_token_id=tokenizer.convert_tokens_to_ids("{name}")' in card
