"""A recipe computes the same however a step is divided among processes."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from drafttrain.models.acceptance_head import load_heads
from drafttrain.models.spec_drafter.model import SpecDrafter
from tests.processes.launching import Launch, kill_nine_when, run
from tests.recipes.tiny_recipe import write_texts
from tests.tiny_drafters import shared
from tests.tiny_models import tiny_model, with_a_token_to_spare
from tests.tiny_targets import save_target
from tests.training.tiny_runs import logged

DRAFTER, HEADS = "train_spec_drafter.py", "train_acceptance_head.py"
STATES = "train_state_drafter.py"
STEPS = 4
LOSSES = ("loss", "held_out_loss")
TRAIN = {
    "max_steps": STEPS,
    "threads": 1,
    "warmup": 2,
    "log_every": 1,
    "learning_rate": 1e-3,
    "adam_eps": 1e-3,  # updates then depend on the size of gradients
    "validate_every": 2,
    "checkpoint_every": 2,
    "average": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target, a drafter and sentences, and settings of both recipes without dropout."""
    folder = tmp_path_factory.mktemp("scale-out")
    target = save_target(shared("marian"), folder / "target")
    tiny_model("marian", seed=5).save_pretrained(folder / "causal-drafter")
    write_texts(folder, 60, 6)
    common = {
        "target": {"path": str(target)},
        "data": {"path": str(folder / "train.txt")},
        "held_out": {"path": str(folder / "val.txt")},
        "distill": {"sampling": {"max_new_tokens": 12}, "shard_rows": 20},
    }
    drafter = {
        "drafter": {"k": 4, "decoder_layers": 1, "dropout": 0.0, "previous_token_rank": 4},
        "train": TRAIN | {"batch_tokens": 400, "clip": 6.5},  # only some steps are clipped
    }
    heads = {
        "drafter": str(folder / "causal-drafter"),
        "heads": {"depths": [0, 2], "rejection_weights": [1.0, 6.0]},
        "train": TRAIN | {"batch_tokens": 60, "clip": 0.3},
    }
    causal_target = save_target(with_a_token_to_spare("llama"), folder / "causal-target")
    states = {
        "target": {"path": str(causal_target)},
        "drafter": {"k": 3, "output_tokens": 20},
        "objective": {"total_variation": 1.0, "packed_tokens": 100},
        "train": TRAIN | {"batch_tokens": 200, "clip": 2.0},
    }
    recipes = {DRAFTER: drafter, HEADS: heads, STATES: states}
    for recipe, own in recipes.items():
        settings = common | own | {"run": "given by each test"}
        (folder / f"{recipe}.yaml").write_text(yaml.safe_dump(settings))
    return folder


def launch(folder: Path, recipe: str, name: str, *overrides: str, **how: Any) -> Launch:
    settings = ["--debug", "--config", str(folder / f"{recipe}.yaml"), f"run={folder / name}"]
    return Launch(recipe, [*settings, *overrides], folder / f"{name}.log", **how)


@pytest.fixture(scope="module")
def alone(folder) -> Path:
    """A run of the Spec-Drafter recipe in one process, with two batches per step."""
    run(launch(folder, DRAFTER, "alone", "train.accumulation=2"))
    return folder / "alone"


def test_two_processes_have_the_losses_of_one_drafter_run(folder, alone):
    run(launch(folder, DRAFTER, "pair", processes=2))
    check_losses(alone, folder / "pair")


def test_two_processes_have_the_losses_of_every_head_of_one_run(folder):
    one, two = folder / "heads-alone", folder / "heads-pair"
    run(launch(folder, HEADS, one.name, "train.accumulation=2"))
    run(launch(folder, HEADS, two.name, processes=2))
    heads = load_heads(two)
    assert len(heads) == 4
    check_losses(one, two, *(f"loss/{name}" for name in heads))


def test_two_processes_have_the_losses_of_one_language_model_run(folder):
    one, two = folder / "states-alone", folder / "states-pair"
    run(launch(folder, STATES, one.name, "train.accumulation=2"))
    run_killed_once(launch(folder, STATES, two.name, processes=2), two)
    check_losses(one, two, *LOSSES, "acceptance")


def test_fsdp_has_the_losses_of_one_process_and_goes_on_after_a_kill_to_the_same_bits(
    folder, alone
):
    whole, cut = folder / "fsdp", folder / "fsdp-killed"
    run(launch(folder, DRAFTER, whole.name, processes=2, file="fsdp2.yaml"))
    check_losses(alone, whole)
    check_final(alone, whole)
    run_killed_once(launch(folder, DRAFTER, cut.name, processes=2, file="fsdp2.yaml"), cut)
    final = Path("final") / "model.safetensors"
    assert (cut / final).read_bytes() == (whole / final).read_bytes()


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="extra deepspeed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_has_the_losses_of_one_process_and_goes_on_after_a_kill(stage, folder, alone):
    zero = folder / f"zero{stage}"
    how = {"file": f"deepspeed_zero{stage}.yaml", "environment": {"DS_ACCELERATOR": "cpu"}}
    run_killed_once(launch(folder, DRAFTER, zero.name, processes=2, **how), zero)
    check_losses(alone, zero)
    check_final(alone, zero)


def check_losses(one: Path, other: Path, *values: str) -> None:
    """Asserts that two runs logged the same values at every step, by default the losses."""
    for value in values or LOSSES:
        first, second = logged(one, value), logged(other, value)
        assert len(first) in (STEPS, STEPS // 2)  # held-out values at every second step
        assert second == pytest.approx(first, rel=0, abs=1e-5)


def run_killed_once(launch: Launch, place: Path) -> None:
    """Kills all processes (kill -9) at the first checkpoint, then runs them to the end."""
    kill_nine_when(lambda: any(place.glob("checkpoints/step-*")), launch)
    assert not (place / "final").exists()
    assert "resuming" in run(launch)


def check_final(alone: Path, other: Path) -> None:
    """Asserts that the drafter loads and has the weights of the run in one process."""
    SpecDrafter.from_pretrained(other / "final")
    one, two = (load_file(run / "final" / "model.safetensors") for run in (alone, other))
    assert one.keys() == two.keys()
    for name, weights in one.items():
        assert weights.shape == two[name].shape and weights.dtype == two[name].dtype
        assert (weights - two[name]).abs().max() <= 1e-4, name
