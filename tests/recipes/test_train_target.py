"""A small target trained from scratch, saved, and used for distillation."""

import json
import re
from collections.abc import Callable

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from recipes.train_target import main

Run = Callable[..., tuple[int, str]]

SHAPES = {
    "marian": {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
    },
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


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
        "train": {
            "max_steps": 6,
            "batch_tokens": 300,
            "warmup": 2,
            "checkpoint_every": 3,
            "threads": 1,
        },
    }


@pytest.fixture
def run(tmp_path, monkeypatch, capsys) -> Run:
    """Runs the recipe in this process and returns its exit code and output."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def run(settings: dict, *overrides: str) -> tuple[int, str]:
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(settings))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["--config", str(file), *overrides])
        return int(ended.value.code or 0), "".join(capsys.readouterr())

    return run


@pytest.mark.parametrize("family", SHAPES)
def test_trained_target_loads_and_its_perplexity_was_logged(family, settings, tmp_path, run):
    settings["model"] = {"model_type": family} | SHAPES[family]
    code, printed = run(settings, "save_dtype=float16")
    assert code == 0 and "nothing was learned" in printed, printed  # after so few steps
    final = tmp_path / "run" / "final"
    model = AutoModelForSeq2SeqLM.from_pretrained(final, use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert model.config.decoder_start_token_id == tokenizer.pad_token_id
    ids = tokenizer("one two").input_ids
    assert ids[-1] == tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "one two"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert any(json.loads(line).get("perplexity", 0) > 1 for line in lines)


def test_decoder_only_target_continues_its_prompts_with_their_references(settings, tmp_path, run):
    settings |= {"model": LLAMA, "vocab_size": 300, "label_smoothing": 0.0}
    settings["data"]["suffix"] = " -> "
    settings["held_out"]["suffix"] = " -> "
    settings["train"] |= {"max_steps": 150, "learning_rate": 2e-2, "checkpoint_every": 150}
    code, printed = run(settings)
    assert code == 0 and "nothing was learned" not in printed, printed
    final = tmp_path / "run" / "final"
    model = AutoModelForCausalLM.from_pretrained(final, use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(final)
    prompt = tokenizer("one -> ", return_tensors="pt")
    assert prompt.input_ids[0, -1] != tokenizer.eos_token_id  # nothing is appended to a prompt
    new = model.generate(**prompt, max_new_tokens=20)[0, prompt.input_ids.shape[1] :]
    assert re.fullmatch(r"ONE[A-Z ]*\.</s>", tokenizer.decode(new))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line)["perplexity"] for line in lines if "perplexity" in line]
    assert 1 < found[-1] < 3


def test_a_drafter_learns_from_its_target_and_validation_reports_acceptance(
    settings, tmp_path, run
):
    settings |= {"model": LLAMA, "vocab_size": 300}
    code, error = run(settings)
    assert code == 0, error
    del settings["vocab_size"]
    settings |= {"run": str(tmp_path / "drafter"), "teacher": {"path": str(tmp_path / "run/final")}}
    settings["train"] |= {"max_steps": 40, "learning_rate": 1e-2, "validate_every": 20}
    code, error = run(settings)
    assert code == 0, error
    lines = (tmp_path / "drafter" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line)["acceptance"] for line in lines if "acceptance" in line]
    assert 0 < found[0] < found[-1] <= 1
    vocabularies = [
        AutoTokenizer.from_pretrained(tmp_path / folder / "final").get_vocab()
        for folder in ("run", "drafter")
    ]
    assert vocabularies[0] == vocabularies[1]
