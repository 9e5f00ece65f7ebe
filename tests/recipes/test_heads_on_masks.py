"""Heads for a drafter through masks, end to end: trained, measured, handed over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafttrain.cli import main as drafttrain
from drafttrain.commands.export import export
from drafttrain.config.commands import ExportConfig
from drafttrain.config.policy import read_policy
from drafttrain.data.hidden.states import CacheManifest
from drafttrain.export.verify import compare
from drafttrain.models.acceptance_head import load_heads
from recipes.train_acceptance_head import main
from tests.recipes.tiny_recipe import exit_code, write_recipe
from tests.tiny_drafters import MASK
from tests.tiny_models import near_copy, tiny_model
from tests.tiny_targets import save_target, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a drafter through masks and a recipe for heads; sampled outputs."""
    place = tmp_path_factory.mktemp("masks")
    model = tiny_model("llama").float()
    save_target(model, place / "target")
    drafter = near_copy(model, 0.05, seed=1)
    drafter.save_pretrained(place / "causal")
    drafter.config.pard_token, drafter.config.k = MASK, 3
    drafter.save_pretrained(place / "drafter")
    tiny_tokenizer().save_pretrained(place / "drafter")
    sampling = {"temperature": 1.0, "top_k": 20, "max_new_tokens": 10}
    write_recipe(
        place,
        12,
        4,
        drafter=str(place / "drafter"),
        distill={"method": "sample", "sampling": sampling},
        cache={"blocks_per_row": 5},
        heads={"depths": [1], "rejection_weights": [1.0]},
        train={"threads": 1, "max_steps": 4, "batch_tokens": 60, "learning_rate": 1e-2},
    )
    return place


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cache.mixing=0.3", "mixing = 0.3 counts for token states only, but slot states"),
        ("drafter={folder}/causal", "blocks_per_row = 5 counts for drafters of blocks only"),
        ("cache.k=0", "cache.k = 0"),
    ],
)
def test_what_users_of_slots_are_told_is_told_here(
    folder: Path, override: str, message: str, capsys: pytest.CaptureFixture
) -> None:
    arguments = ["--config", str(folder / "recipe.yaml"), f"run={folder / 'refused'}"]
    assert exit_code(main, *arguments, override.format(folder=folder)) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "refused").exists()


def test_a_head_is_trained_measured_and_exported(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    run, drafter = folder / "run", str(folder / "drafter")
    assert exit_code(main, "--config", str(folder / "recipe.yaml")) == 0, capsys.readouterr().err
    manifest = CacheManifest.read(run / "cache")
    assert (manifest.state, manifest.k, manifest.hidden_size) == ("slot", 3, 16)
    [(name, head)] = load_heads(run).items()
    assert head.config.state == "slot"

    target = ["--target", str(folder / "target")]
    quick = ["repeats=1", "warmup=0", "bootstrap=20", "baselines=[]"]
    quick += ["--data", str(folder / "val.txt"), "--max-new-tokens", "10"]
    swept = ["--sweep", "h=0.1,0.9", "--sweep", "k=3"]
    report = ["--report", str(folder / "report.json")]
    arguments = [*target, "--drafter", drafter, "--head", str(run), *quick, *swept, *report]
    assert exit_code(drafttrain, "eval", *arguments) == 0, capsys.readouterr().err
    _, *runs = json.loads((folder / "report.json").read_text())["runs"]
    discarded = {one["stop"]: one["metrics"]["discard_rate"]["value"] for one in runs}
    assert discarded["head(0.1)"] < discarded["head(0.9)"] <= discarded["k=3"]
    assert all(one["metrics"]["identical"]["value"] == 1.0 for one in runs)

    tree = ["--tree", "opt-tree", "decode.tree.nodes=4", f"decode.tree.head={run}"]
    said = []
    for method in (["--drafter", "none"], ["--drafter", drafter, *tree]):
        text = ["--text", "w5 w6 w7", "--max-new-tokens", "6"]
        assert exit_code(drafttrain, "generate", *target, *method, *text) == 0
        said.append(capsys.readouterr().out.splitlines()[-1])
    assert said[0] == said[1]

    out = folder / "out"
    export(ExportConfig(drafter=drafter, head=run / "final" / name, h=0.4, out=out), reload=compare)
    exported = read_policy(out / "policy.json")
    assert (exported.stop, exported.h, exported.max_draft) == ("head", 0.4, 3)
