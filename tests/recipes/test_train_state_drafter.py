"""State drafters end to end: fitted, trained, resumed, measured, refused."""

from pathlib import Path

from drafttrain.models.state_drafter import StateDrafter
from recipes.train_state_drafter import main
from tests.commanding import ended
from tests.comparing import same_weights
from tests.recipes.tiny_recipe import (
    decodes_as_validated,
    exported,
    language_project,
    resumed_as_if_never_stopped,
    trained_once,
)
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target


def make_project(folder: Path, rank: int = 0) -> list[str]:
    return language_project(folder, drafter={"previous_token_rank": rank})


def test_one_command_leaves_a_drafter_that_eval_generate_and_export_take(tmp_path, capsys):
    arguments, run = make_project(tmp_path, 5), tmp_path / "run"
    assert "maps fitted along" in trained_once(main, arguments, run, capsys)
    drafter, start = (StateDrafter.from_pretrained(run / name) for name in ("final", "start"))
    assert drafter.config.context_layers == [2, 3] and drafter.config.state_layers == [1, 2, -1]
    assert drafter.config.previous_token_rank == 5
    assert len(drafter.config.draftable_tokens) == 12
    assert not same_weights(drafter, start)
    own = decodes_as_validated(run, capsys)
    assert all(0 < own["validation"][f"acceptance/{slot}"] < 1 for slot in (1, 2, 3))

    card = (exported(run, capsys) / "README.md").read_text()
    assert "target = AutoModelForCausalLM.from_pretrained(" in card
    assert "`drafttrain.models.state_drafter.StateDrafter.from_pretrained(...)`" in card
    assert "a state drafter for this target only" in card and "drafts for" not in card

    save_target(tiny_model("llama", seed=9, num_hidden_layers=4).float(), tmp_path / "other")
    save_target(tiny_model("llama", num_hidden_layers=2).float(), tmp_path / "shallow")
    file = run / "start" / "config.json"
    file.write_text(file.read_text().replace('"context_layers"', '"other_layers"'))
    for target, model, message in (
        ("other", run, "other weights than the given target"),
        ("shallow", run, "reads layer 2 of its target, but"),
        ("target", run / "start", "does not say what it reads: context_layers = None"),
    ):
        given = ["--target", tmp_path / target, "--text", "w5", "--drafter", model]
        assert ended("generate", *given) == 2 and message in capsys.readouterr().err
    assert ended("export", f"out={tmp_path / 'served'}", "--drafter", run, "--for", "vllm") == 2
    assert "is a state drafter" in capsys.readouterr().err


def test_interrupted_training_ends_with_the_same_bits_and_blocks_draft_trees(tmp_path):
    resumed_as_if_never_stopped(main, make_project(tmp_path, 5), tmp_path, "final", "start")
    tree = ["--drafter", str(tmp_path / "run"), "--text", "w5 w6", "--tree", "opt-tree"]
    assert ended("generate", *tree, "--max-new-tokens", "3") == 0
