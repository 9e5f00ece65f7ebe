"""A recipe computes the same however a step is divided among processes."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
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
STEPS = 8
TRAIN = {
    "max_steps": STEPS,
    "threads": 1,
    "warmup": 2,
    "log_every": 1,
    "learning_rate": 1e-3,
    "adam_eps": 1e-3,  # updates then depend on the size of gradients
    "validate_every": 4,
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
        write_settings(folder, recipe, common | own)
    return folder


def write_settings(folder: Path, recipe: str, settings: dict[str, Any]) -> None:
    settings["run"] = "given by each test"
    (folder / f"{recipe}.yaml").write_text(yaml.safe_dump(settings))


def launch(folder: Path, recipe: str, name: str, *overrides: str, **how: Any) -> Launch:
    settings = ["--debug", "--config", str(folder / f"{recipe}.yaml"), f"run={folder / name}"]
    return Launch(recipe, [*settings, *overrides], folder / f"{name}.log", **how)


def largest_difference(one: Path, other: Path, value: str = "loss") -> float:
    losses = [torch.tensor(logged(run, value), dtype=torch.float64) for run in (one, other)]
    assert losses[0].shape == losses[1].shape
    return float((losses[0] - losses[1]).abs().max())


@pytest.fixture(scope="module")
def alone(folder) -> Path:
    """A run of the Spec-Drafter recipe in one process, with two batches per step."""
    run(launch(folder, DRAFTER, "alone", "train.accumulation=2"))
    return folder / "alone"


def test_two_processes_have_the_losses_of_one_drafter_run(folder, alone):
    run(launch(folder, DRAFTER, "pair", processes=2))
    assert len(logged(alone, "loss")) == STEPS
    assert largest_difference(alone, folder / "pair") <= 1e-5
    assert largest_difference(alone, folder / "pair", "held_out_loss") <= 1e-5


def test_two_processes_have_the_losses_of_every_head_of_one_run(folder):
    run(launch(folder, HEADS, "heads-alone", "train.accumulation=2"))
    run(launch(folder, HEADS, "heads-pair", processes=2))
    heads = load_heads(folder / "heads-pair")
    assert len(heads) == 4
    for name in heads:
        one, two = folder / "heads-alone", folder / "heads-pair"
        assert len(logged(two, f"loss/{name}")) == STEPS
        assert largest_difference(one, two, f"loss/{name}") <= 1e-5


def test_two_processes_have_the_losses_of_one_language_model_run(folder):
    one, two = folder / "states-alone", folder / "states-pair"
    run(launch(folder, STATES, one.name, "train.accumulation=2"))
    pair = launch(folder, STATES, two.name, processes=2)
    kill_at_checkpoint(pair, two)
    assert "resuming" in run(pair)
    assert len(logged(two, "loss")) == STEPS
    for value in ("loss", "held_out_loss", "acceptance"):
        assert largest_difference(one, two, value) <= 1e-5


def test_fsdp_has_the_losses_of_one_process_and_goes_on_after_a_kill_to_the_same_bits(
    folder, alone
):
    whole, cut = folder / "fsdp", folder / "fsdp-killed"
    run(launch(folder, DRAFTER, "fsdp", processes=2, file="fsdp2.yaml"))
    assert largest_difference(alone, whole) <= 1e-5
    assert largest_difference(alone, whole, "held_out_loss") <= 1e-5
    check_final(alone, whole)
    again = launch(folder, DRAFTER, "fsdp-killed", processes=2, file="fsdp2.yaml")
    kill_at_checkpoint(again, cut)
    assert "resuming" in run(again)
    final = Path("final") / "model.safetensors"
    assert (cut / final).read_bytes() == (whole / final).read_bytes()


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="extra deepspeed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_has_the_losses_of_one_process_and_goes_on_after_a_kill(stage, folder, alone):
    name = f"zero{stage}"
    how = {"file": f"deepspeed_zero{stage}.yaml", "environment": {"DS_ACCELERATOR": "cpu"}}
    zero = launch(folder, DRAFTER, name, processes=2, **how)
    kill_at_checkpoint(zero, folder / name)
    assert "resuming" in run(zero)
    assert largest_difference(alone, folder / name) <= 1e-5
    check_final(alone, folder / name)


def kill_at_checkpoint(launch: Launch, place: Path) -> None:
    """Kills all processes (kill -9) when the first checkpoint exists."""
    kill_nine_when(lambda: any(place.glob("checkpoints/step-*")), launch)
    assert not (place / "final").exists()


def check_final(alone: Path, other: Path) -> None:
    """Asserts that the drafter loads and has the weights of the run in one process."""
    SpecDrafter.from_pretrained(other / "final")
    one, two = (load_file(run / "final" / "model.safetensors") for run in (alone, other))
    assert one.keys() == two.keys()
    for name, weights in one.items():
        assert weights.shape == two[name].shape and weights.dtype == two[name].dtype
        assert (weights - two[name]).abs().max() <= 1e-4, name
