"""What an export is for: a fresh process decodes with it, and the output is the target's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from drafttrain.cli import main
from tests.export.pairs import export_to, noisy_copy, save_drafter, save_head, save_spec_drafter
from tests.tiny_models import tiny_model
from tests.tiny_targets import random_sentences, save_target

NEW_TOKENS = 12
SENTENCES = random_sentences(6)
STRANGER = """
import json, sys
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

pairs, sentences, new_tokens = map(json.loads, sys.argv[1:])
outputs = {}
for name, (target_folder, export) in pairs.items():
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    kind = AutoModelForCausalLM if name == "llama" else AutoModelForSeq2SeqLM
    target = kind.from_pretrained(target_folder, dtype="float32")
    outputs[name] = {"plain": [], "drafted": []}
    for sentence in sentences:
        inputs = tokenizer(sentence, return_tensors="pt", return_token_type_ids=False)
        if name == "llama":
            inputs = {key: value[:, :-1] for key, value in inputs.items()}
        asked = {"max_new_tokens": new_tokens, "do_sample": False, "num_beams": 1}
        plain = target.generate(**inputs, **asked)
        drafted = target.generate(
            **inputs, **asked, custom_generate=export, trust_remote_code=True
        )
        start = inputs["input_ids"].shape[1] if name == "llama" else 1
        outputs[name]["plain"].append(plain[0, start:].tolist())
        outputs[name]["drafted"].append(drafted[0, start:].tolist())
print(json.dumps(outputs))
"""
"""What a user of Transformers writes; nothing of drafttrain is named in it."""


def save_pair(root: Path, family: str, model: PreTrainedModel) -> tuple[str, str]:
    """A target on disk, and an export of a drafter for it."""
    target = save_target(model, root / "target")
    if family == "llama":
        drafter = save_drafter(root / "drafter", family, torch.float32)
        head = save_head(root / "head", noisy_copy(family).float())
        out = export_to(root / "export", drafter=str(drafter), head=head)
    else:
        drafter = save_spec_drafter(root / "drafter", model, target)
        out = export_to(root / "export", drafter=str(drafter))
    return str(target), str(out)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, tuple[str, str]]:
    families = ("marian", "bart", "t5", "llama")
    return {
        family: save_pair(tmp_path_factory.mktemp(family), family, tiny_model(family).float())
        for family in families
    }


@pytest.fixture(scope="module")
def outputs(pairs, tmp_path_factory) -> dict[str, dict[str, list[list[int]]]]:
    """Plain and drafted outputs, decoded by a process that knows nothing but the folders."""
    place = str(tmp_path_factory.mktemp("modules"))
    given = [json.dumps(value) for value in (pairs, SENTENCES, NEW_TOKENS)]
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, *given],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_MODULES_CACHE": place},
        cwd=place,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def generated(capsys, *arguments: str) -> list[dict]:
    """Lines of `drafttrain generate --json` for the sentences."""
    texts = [word for sentence in SENTENCES for word in ("--text", sentence)]
    with pytest.raises(SystemExit) as stopped:
        main(
            ["generate", *texts, "--json", *arguments]
            + [f"decode.sampling.max_new_tokens={NEW_TOKENS}"]
        )
    assert stopped.value.code == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("family", ["marian", "bart", "t5", "llama"])
def test_a_fresh_process_the_command_and_plain_greedy_agree(capsys, pairs, outputs, family):
    target, export = pairs[family]
    capsys.readouterr()
    lines = generated(capsys, "--target", target, "--drafter", export)
    drafted = [line["tokens"] for line in lines]
    assert any(one["accepted"] for line in lines for one in line["rounds"])
    plain = [line["tokens"] for line in generated(capsys, "--target", target, "--drafter", "none")]
    assert outputs[family]["drafted"] == outputs[family]["plain"] == drafted == plain


def test_the_command_knows_target_and_policy_of_an_export(capsys, pairs):
    _, export = pairs["marian"]
    capsys.readouterr()
    rounds = [one for line in generated(capsys, "--drafter", export) for one in line["rounds"]]
    assert max(len(one["drafted"]) for one in rounds) == 4  # k of policy.json, not the default 10
    longer = generated(capsys, "--drafter", export, "--k", "6")
    assert max(len(one["drafted"]) for line in longer for one in line["rounds"]) == 6
