"""Whole commands with multilingual targets: outputs are those of `generate` in each language."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import drafttrain
from drafttrain.data.shards.outputs import load_distilled
from drafttrain.export.generation import generate
from drafttrain.models.languages import language_tokens
from recipes.train_spec_drafter import main
from tests.commanding import ended, exit_code
from tests.recipes.tiny_recipe import QUICK, exported, write_recipe
from tests.tiny_languages import LANGUAGES, save_language_target

TEXTS = ["w5 w6 w17", "w30"]
NEW = 8


@pytest.fixture(scope="module", params=LANGUAGES)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def run(kind, tmp_path_factory) -> Path:
    """Trains a Spec-Drafter for a few steps and returns its run."""
    root = tmp_path_factory.mktemp("languages")
    target = {"path": str(save_language_target(kind, root / "target"))}
    settings = {
        "target": target
        | dict(zip(("source_language", "target_language"), LANGUAGES[kind], strict=True)),
        "distill": {"sampling": {"max_new_tokens": NEW}},
        "drafter": {"k": 4, "decoder_layers": 1},
        "train": {"max_steps": 20, "batch_tokens": 400, "warmup": 1, "threads": 1},
    }
    assert exit_code(main, "--config", write_recipe(root, 20, 4, **settings)) == 0
    return root / "run"


def test_every_command_decodes_in_the_languages_of_the_run(kind, run, tmp_path, capsys):
    source, output = LANGUAGES[kind]
    path = str(run.parent / "target")
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


def test_an_export_decodes_in_these_languages(kind, run, own_modules, capsys):
    source, output = LANGUAGES[kind]
    out = exported(run, capsys)
    target = AutoModelForSeq2SeqLM.from_pretrained(run.parent / "target")
    tokenizer = AutoTokenizer.from_pretrained(out)  # marks sources as in training
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    token = language_tokens(tokenizer)[output]
    forced = {"forced_bos_token_id": token, "max_new_tokens": NEW, "do_sample": False}
    found = generate(target, **inputs, **forced, assistant_model=str(out))
    expected = target.generate(**inputs, **forced)
    assert torch.equal(found, expected)
    card = (out / "README.md").read_text()
    assert f'src_lang="{source}"' in card
    name = tokenizer.convert_ids_to_tokens(token)
    assert f'forced_bos_token_id=tokenizer.convert_tokens_to_ids("{name}")' in card
