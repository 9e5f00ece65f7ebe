"""The recipe end to end on a tiny target: one command, resumed bit for bit, measured by `eval`."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from drafttrain.config.kinds import CAUSAL, PARALLEL, kind_of
from recipes.train_causal_drafter import main
from tests.commanding import ended, exit_code
from tests.comparing import same_but_undrafted, same_weights
from tests.recipes.tiny_recipe import (
    QUICK,
    decodes_as_validated,
    exported,
    language_project,
    resumed_as_if_never_stopped,
    trained_once,
)
from tests.tiny_models import EOS, tiny_model
from tests.tiny_targets import save_target, tiny_tokenizer

TEMPLATE = "{% for message in messages %}w{{ loop.index + 4 }} {{ message.content }} {% endfor %}w9"
"""Puts a number before every turn, and w9 before the assistant's answer."""


def make_project(folder: Path) -> list[str]:
    """Makes a target of four layers with a chat template, 8 prompts and 3 held-out prompts, and
    returns the arguments of a run of 6 steps with a checkpoint every 2."""
    changes = {
        "data": {"path": str(folder / "train.txt"), "chat": True},
        "held_out": {"path": str(folder / "val.txt"), "chat": True},
        "initialise": {"layers": [0, 3]},
        "objective": {"total_variation": 0.5, "packed_tokens": 40},
        "train": {"batch_tokens": 60},
    }
    arguments, tokenizer = language_project(folder, **changes), tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "target")
    return arguments


def test_one_command_leaves_a_drafter_that_eval_generate_and_export_take(tmp_path, capsys):
    arguments, run = make_project(tmp_path), tmp_path / "run"
    trained_once(main, arguments, run, capsys)
    drafter, start = (AutoModelForCausalLM.from_pretrained(run / n) for n in ("final", "start"))
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight)
    assert torch.equal(start.model.layers[1].mlp.up_proj.weight, layer(target, 3))
    assert not torch.equal(layer(drafter, 1), layer(start, 1))
    tokens = drafter.config.draftable_tokens
    assert len(tokens) == 12 and EOS in tokens and sorted(set(tokens)) == tokens
    own = decodes_as_validated(run, capsys)
    assert own["drafter"] == "causal" and 0 < own["validation"]["acceptance"] < 1
    assert own["validation"]["mean_acceptance_length"] >= 1
    texts = [f"--text={text}" for text in (tmp_path / "val.txt").read_text().splitlines()]
    outputs = []
    for rows in (["--data", tmp_path / "val.txt", "data.chat=true"], ["--chat", *texts]):
        given = ["--drafter", run, *rows, "--json", "--max-new-tokens", "5"]
        assert ended("generate", *given) == 0
        lines = capsys.readouterr().out.splitlines()
        outputs.append([json.loads(line)["tokens"] for line in lines])
    assert len(outputs[0]) == 3 and outputs[0] == outputs[1]

    exported(run, capsys)
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings["num_assistant_tokens"] == 3  # as in validation
    out = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same_but_undrafted(drafter, out)  # has scores of all tokens
    assert out.config.draftable_tokens == tokens
    logits = out(torch.tensor([[5, 6], [7, 8]])).logits
    assert logits.isfinite().all() and torch.isin(logits.argmax(-1), torch.tensor(tokens)).all()


def test_a_drafter_of_blocks_fills_in_masks_and_starts_without_them(tmp_path, capsys):
    arguments, run = language_project(tmp_path, initialise={"layers": [0, 3]}), tmp_path / "run"
    batches = []
    for drafts in ("tokens", "blocks"):
        own = [f"drafter.drafts={drafts}", "train.batch_tokens=40", "--dry-run"]
        assert exit_code(main, *arguments, *own) == 0
        batches.append(int(re.search(r"batches +(\d+)", capsys.readouterr().out)[1]))
    assert batches[0] < batches[1], "masks count too"
    printed = trained_once(main, [*arguments, "drafter.drafts=blocks"], run, capsys)
    drafter, start = (AutoModelForCausalLM.from_pretrained(run / n) for n in ("final", "start"))
    assert kind_of(drafter.config) is PARALLEL and kind_of(start.config) is CAUSAL
    mask = drafter.config.pard_token
    assert f"mask: token {mask}, " in printed
    assert drafter.config.k == 3 and 0 <= mask < drafter.config.vocab_size
    assert not same_weights(drafter, start)

    own = decodes_as_validated(run, capsys)
    assert own["name"].startswith("run k=3") and own["drafter"] == "parallel"
    assert all(0 < own["validation"][f"acceptance/{slot}"] < 1 for slot in (1, 2, 3))

    exported(run, capsys)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (settings["pard_token"], settings["k"], settings["model_type"]) == (mask, 3, "llama")
    card = (tmp_path / "out" / "README.md").read_text()
    assert '"parallel_drafting": true' in card and "custom_generate" in card
    assert "SGLang" not in card and "SpecDrafter" not in card
    out = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same_but_undrafted(drafter, out)


def layer(model, number: int) -> torch.Tensor:
    return model.model.layers[number].mlp.up_proj.weight


def test_another_model_trains_too_in_the_set_dtype(tmp_path):
    own = [f"initialise={{path: {tmp_path / 'target'}}}"]
    own += ["train.max_steps=2", "save_dtype=float16", "objective.packed_tokens=null"]
    own += ["drafter.output_tokens=null"]
    assert exit_code(main, *make_project(tmp_path), *own) == 0
    for folder in ("start", "final"):
        drafter = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / folder)
        assert drafter.dtype == torch.float16


def test_a_cached_teacher_is_made_once_and_a_stopped_run_ends_with_the_same_bits(tmp_path, capsys):
    arguments = [*make_project(tmp_path), "teacher={kind: cached, top_k: 4}"]
    assert exit_code(main, *arguments, "--dry-run") == 0
    resumed_as_if_never_stopped(main, arguments, tmp_path, "final", "start")
    printed = capsys.readouterr().err
    assert "the 4 likeliest of 12 tokens hold 0." in printed
    assert len(list((tmp_path / "whole" / "distilled-teacher").glob("*.safetensors"))) == 1


def test_rows_longer_than_the_drafter_s_positions_are_refused(tmp_path, capsys):
    short = tiny_model("gpt2", max_position_embeddings=10).float()
    save_target(short, tmp_path / "short")
    start = f"initialise={{path: {tmp_path / 'short'}}}"
    assert exit_code(main, *make_project(tmp_path), start) == 2
    assert "drafter has 10 positions; leave long rows out" in capsys.readouterr().err


def test_a_run_without_embeddings_is_measured_and_leaves_as_a_whole_folder(tmp_path, capsys):
    arguments, run = [*make_project(tmp_path), "drafter.embeddings=target"], tmp_path / "run"
    assert exit_code(main, *arguments) == 0, capsys.readouterr().err
    for folder in ("start", "final"):
        assert "lm_head.weight" not in load_file(run / folder / "model.safetensors")
    assert ended("eval", "--drafter", run, *QUICK) == 0
    own = json.loads((run / "report.json").read_text())["runs"][1]
    assert own["metrics"]["identical"]["value"] == 1.0
    (tmp_path / "target").rename(tmp_path / "moved")
    folder = exported(run, capsys, target={"path": str(tmp_path / "moved")})
    out = AutoModelForCausalLM.from_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "moved")
    few = out.config.draftable_tokens
    assert torch.equal(out.lm_head.weight[few], target.lm_head.weight[few])
    assert torch.equal(out.model.embed_tokens.weight, target.model.embed_tokens.weight)
