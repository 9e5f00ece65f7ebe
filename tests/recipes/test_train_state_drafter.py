"""State drafters end to end: fitted, trained, resumed, measured, refused."""

from pathlib import Path

from drafttrain.cli import main as drafttrain
from drafttrain.commands.export import export
from drafttrain.config.commands import ExportConfig
from drafttrain.export.verify import compare
from drafttrain.models.state_drafter import StateDrafter
from recipes.train_state_drafter import main
from tests.comparing import same_weights
from tests.recipes.tiny_recipe import (
    decodes_as_validated,
    exit_code,
    language_project,
    plans_and_writes_nothing,
    resumed_as_if_never_stopped,
)
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target


def make_project(folder: Path, rank: int = 0) -> list[str]:
    return language_project(folder, drafter={"previous_token_rank": rank})


def test_one_command_leaves_a_drafter_that_eval_generate_and_export_take(tmp_path, capsys):
    arguments, run = make_project(tmp_path, 5), tmp_path / "run"
    plans_and_writes_nothing(main, arguments, run, capsys)
    assert exit_code(main, *arguments) == 0, capsys.readouterr().err
    assert "maps fitted along" in capsys.readouterr().out
    drafter, start = (StateDrafter.from_pretrained(run / name) for name in ("final", "start"))
    assert drafter.config.context_layers == [2, 3] and drafter.config.state_layers == [1, 2, -1]
    assert drafter.config.previous_token_rank == 5
    assert len(drafter.config.draftable_tokens) == 12
    assert not same_weights(drafter, start)
    own = decodes_as_validated(run, capsys)
    assert all(0 < own["validation"][f"acceptance/{slot}"] < 1 for slot in (1, 2, 3))

    export(ExportConfig(drafter=str(run), out=tmp_path / "out"), reload=compare)
    printed = capsys.readouterr().out
    assert "every part equal to the original; the target's output unchanged for 3 inputs" in printed
    card = (tmp_path / "out" / "README.md").read_text()
    assert "target = AutoModelForCausalLM.from_pretrained(" in card
    assert "`drafttrain.models.state_drafter.StateDrafter.from_pretrained(...)`" in card
    assert "a state drafter for this target only" in card and "drafts for" not in card
    given = ["export", f"out={tmp_path / 'served'}", "--drafter", str(run), "--for", "vllm"]
    assert exit_code(drafttrain, *given) == 2
    assert "is a state drafter" in capsys.readouterr().err
    save_target(tiny_model("llama", seed=9, num_hidden_layers=4).float(), tmp_path / "other")
    given = ["--target", str(tmp_path / "other"), "--text", "w5", "--drafter", str(run)]
    assert exit_code(drafttrain, "generate", *given) != 0
    assert "other weights than the given target" in capsys.readouterr().err
    shallow = save_target(tiny_model("llama", num_hidden_layers=2).float(), tmp_path / "shallow")
    given = ["--target", str(shallow), "--text", "w5", "--drafter", str(run)]
    assert exit_code(drafttrain, "generate", *given) == 2
    assert "reads layer 2 of its target, but" in capsys.readouterr().err
    file = run / "start" / "config.json"
    file.write_text(file.read_text().replace('"context_layers"', '"other_layers"'))
    given = ["--target", str(tmp_path / "target"), "--text", "w5", "--drafter", str(run / "start")]
    assert exit_code(drafttrain, "generate", *given) == 2
    assert "does not say what it reads: context_layers = None" in capsys.readouterr().err


def test_interrupted_training_ends_with_the_same_bits_and_blocks_draft_trees(tmp_path):
    resumed_as_if_never_stopped(main, make_project(tmp_path, 5), tmp_path, "final", "start")
    tree = ["--drafter", str(tmp_path / "run"), "--text", "w5 w6", "--tree", "opt-tree"]
    assert exit_code(drafttrain, "generate", *tree, "--max-new-tokens", "3") == 0
