"""A small target trained from scratch, saved, and used for distillation."""

import json
import re
from pathlib import Path

import datasets
import pytest
import yaml
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from recipes.train_target import main, tokenize_rows
from tests.commanding import exit_code
from tests.refusals import LANGUAGE_MODEL
from tests.tiny_models import BART_SHAPE, BOS
from tests.tiny_targets import tiny_tokenizer
from tests.training.tiny_runs import logged

SHAPES = {
    "marian": {
        name: value for name, value in BART_SHAPE.items() if "coder" in name or name == "d_model"
    },
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
}


def run(capsys, settings: dict, *overrides: str) -> str:
    """Runs the recipe in this process and returns its output."""
    file = Path(settings["run"]).with_suffix(".yaml")
    file.write_text(yaml.safe_dump(settings))
    capsys.readouterr()
    code, printed = exit_code(main, "--config", file, *overrides), "".join(capsys.readouterr())
    assert code == 0, printed
    return printed


@pytest.fixture
def settings(tmp_path) -> dict:
    """Settings with sixty pairs of a sentence and the sentence in capitals."""
    words = ["one", "two", "three", "four", "five", "six"]
    rows = []
    for i in range(60):
        text = " ".join(words[(i * j + j) % 6] for j in range(1, 3 + i % 4))
        rows.append(json.dumps({"source": text, "reference": text.upper() + "."}))
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    return {
        "run": str(tmp_path / "run"),
        "data": {"path": str(tmp_path / "pairs.jsonl")},
        "held_out": {"path": str(tmp_path / "pairs.jsonl"), "limit": 10},
        "vocab_size": 80,
        "train": {"max_steps": 6, "batch_tokens": 300, "warmup": 2, "threads": 1},
    }


@pytest.mark.parametrize("family", SHAPES)
def test_trained_target_loads_and_its_perplexity_was_logged(family, settings, tmp_path, capsys):
    settings["model"] = {"model_type": family} | SHAPES[family]
    printed = run(capsys, settings, "save_dtype=float16")
    assert "nothing was learned" in printed  # after so few steps
    final = tmp_path / "run" / "final"
    model = AutoModelForSeq2SeqLM.from_pretrained(final, use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert model.config.decoder_start_token_id == tokenizer.pad_token_id
    ids = tokenizer("one two").input_ids
    assert ids[-1] == tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "one two"
    assert max(logged(tmp_path / "run", "perplexity")) > 1


def test_decoder_only_target_continues_its_prompts_with_their_references(
    settings, tmp_path, capsys
):
    settings |= {"model": LANGUAGE_MODEL, "vocab_size": 300, "label_smoothing": 0.0}
    settings["data"]["suffix"] = settings["held_out"]["suffix"] = " -> "
    settings["train"] |= {"max_steps": 150, "learning_rate": 2e-2}
    assert "nothing was learned" not in run(capsys, settings)
    final = tmp_path / "run" / "final"
    model = AutoModelForCausalLM.from_pretrained(final, use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(final)
    prompt = tokenizer("one -> ", return_tensors="pt")
    assert prompt.input_ids[0, -1] != tokenizer.eos_token_id  # nothing is appended to a prompt
    new = model.generate(**prompt, max_new_tokens=20)[0, prompt.input_ids.shape[1] :]
    assert re.fullmatch(r"ONE[A-Z ]*\.</s>", tokenizer.decode(new))
    assert 1 < logged(tmp_path / "run", "perplexity")[-1] < 3


def test_texts_start_with_one_bos_and_pairs_without_reference_are_left_out():
    tokenizer = tiny_tokenizer(end=False)
    first = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer._tokenizer.post_processor = first
    rows = datasets.Dataset.from_dict({"source": ["w4 w5", "w6"], "reference": ["w7", None]})
    texts, pairs = (tokenize_rows("x", rows, tokenizer, 9, pairs) for pairs in (False, True))
    assert texts[:] == {"source_ids": [[BOS, 4, 5], [BOS, 6]], "target_ids": [[7, 1], [1]]}
    assert len(pairs) == 1


def test_a_drafter_learns_from_its_target_and_validation_reports_acceptance(
    settings, tmp_path, capsys, monkeypatch
):
    settings |= {"model": LANGUAGE_MODEL, "vocab_size": 300}
    run(capsys, settings)
    del settings["vocab_size"]
    other = AutoTokenizer.from_pretrained(tmp_path / "run/final")
    other.pad_token = None
    other.save_pretrained(tmp_path / "run/final")
    settings |= {"run": str(tmp_path / "drafter"), "teacher": {"path": str(tmp_path / "run/final")}}
    settings["train"] |= {"max_steps": 40, "learning_rate": 1e-2, "validate_every": 20}
    with monkeypatch.context() as dry:
        dry.setattr("recipes.train_target.load_target", None)
        assert "steps" in run(capsys, settings, "--dry-run")
    run(capsys, settings)
    found = logged(tmp_path / "drafter", "acceptance")
    assert 0 < found[0] < found[-1] <= 1
    own, target = (
        AutoTokenizer.from_pretrained(tmp_path / n / "final") for n in ("drafter", "run")
    )
    assert own.get_vocab() == target.get_vocab()
