"""The recipe trains heads for a target and a drafter in one command; what it refuses."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModel

from drafttrain.data.hidden.states import CacheManifest
from drafttrain.models.acceptance_head import AcceptanceHead, AcceptanceHeadConfig, load_heads
from drafttrain.training.objectives.head_sweep import HeadSweep
from recipes.train_acceptance_head import Validation, main
from tests.commanding import exit_code
from tests.recipes.tiny_recipe import write_recipe
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target

HEADS = {"D0-w1", "D0-w6", "D2-w1", "D2-w6"}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> SimpleNamespace:
    """A finished run on 30 sentences and 6 held-out ones: two mixes, four heads, 8 steps."""
    folder = tmp_path_factory.mktemp("heads")
    save_target(tiny_model("marian"), folder / "target")
    tiny_model("marian", seed=5).save_pretrained(folder / "drafter")
    sampling = {"temperature": 1.0, "top_k": 20, "max_new_tokens": 8}
    train = {"max_steps": 8, "batch_tokens": 60, "learning_rate": 1e-3, "log_every": 4}
    settings = {
        "drafter": str(folder / "drafter"),
        "distill": {"method": "sample", "sampling": sampling},
        "cache": {"state": "token", "mixing": 0.2, "mixes": 2},
        "heads": {"depths": [0, 2], "rejection_weights": [1.0, 6.0]},
        "train": train | {"threads": 1},
    }
    file = write_recipe(folder, 30, 6, **settings)
    code = exit_code(main, "--config", str(file))
    return SimpleNamespace(folder=folder, file=file, run=folder / "run", code=code)


def test_one_command_leaves_every_head_with_what_it_is_for(made):
    assert made.code == 0
    heads = load_heads(made.run)
    assert set(heads) == HEADS
    manifest = CacheManifest.read(made.run / "cache")
    assert manifest.mixes == 2 and len(manifest.counts) == 2
    for name, head in heads.items():
        config = head.config
        assert config.name == name and config.hidden_size == 16 and config.state == "token"
        assert config.drafter["path"] == str(made.folder / "drafter")
        assert config.drafter["weights_sha256"] == manifest.drafter.weights_sha256
        assert config.target["weights_sha256"] == manifest.target.weights_sha256
        assert config.drafter["weights_sha256"] != config.target["weights_sha256"]
        assert config.sampling == {"temperature": 1.0, "top_k": 20, "top_p": 1.0}
        assert config.mixing == 0.2
    again = AutoModel.from_pretrained(made.run / "final" / "D2-w6")
    assert isinstance(again, AcceptanceHead)


def test_held_out_measures_of_every_head_are_logged(made):
    lines = [json.loads(x) for x in (made.run / "metrics.jsonl").read_text().splitlines()]
    last = {key: value for line in lines for key, value in line.items()}
    for name in HEADS:
        for measure in ("loss", "accuracy", "held_out_kl", "held_out_loss", "mean_predicted"):
            assert math.isfinite(last[f"{measure}/{name}"])
    assert last["best_kl"] == min(last[f"held_out_kl/{name}"] for name in HEADS)
    assert 0 < last["mean_acceptance"] < 1
    assert CacheManifest.read(made.run / "held_out_cache").mixes == 1


def test_other_heads_are_trained_on_the_outputs_of_a_run(made, tmp_path):
    given = [f"run={tmp_path / 'run'}", f"distilled={made.run / 'distilled'}", "train.max_steps=1"]
    assert exit_code(main, "--config", str(made.file), *given, "cache.mixing=0.4") == 0
    assert not (tmp_path / "run" / "distilled").exists()
    cache = CacheManifest.read(tmp_path / "run" / "cache").settings
    assert (cache.mixing, cache.distilled) == (0.4, made.run / "distilled")
    for wrong in ("distill.shard_rows=7", "data.limit=2"):
        other = [*given[1:], f"run={tmp_path / 'refused'}", wrong]
        assert exit_code(main, "--config", str(made.file), *other) == 2
        assert not (tmp_path / "refused").exists(), "the corrected command begins a run of its own"


def test_dry_run_prints_the_plan_and_writes_nothing(made, tmp_path, capsys):
    run = tmp_path / "run"
    assert exit_code(main, "--config", str(made.file), f"run={run}", "--dry-run") == 0
    printed = capsys.readouterr().out
    for word in ("heads", "distillation", "positions", "steps", "disk", "memory"):
        assert word in printed
    assert "4, 1,156 parameters" in printed  # 2 * 17 + 2 * (2 * 16 * 17 + 17)
    assert not run.exists()


def test_validation_by_hand():
    """Prediction P^ = 3/4 at all positions; labels 1 and 1/2; w_rej = 3."""
    head = AcceptanceHead(AcceptanceHeadConfig(hidden_size=4, depth=0, rejection_weight=3.0))
    torch.nn.init.zeros_(head.out.weight)
    torch.nn.init.constant_(head.out.bias, math.log(3.0))
    labels = torch.tensor([1.0, 0.5])
    cache = SimpleNamespace(rows=[0], read=lambda mix, rows: (torch.randn(2, 4), labels))
    with torch.no_grad():
        found = Validation(cache)(HeadSweep([head]))
    kl = (math.log(4 / 3) + 0.5 * math.log(2 / 3) + 0.5 * math.log(2.0)) / 2
    loss = 1.5 * math.log(4 / 3) + 1.5 * math.log(4.0)
    assert found["held_out_kl/D0-w3"] == pytest.approx(kl)
    assert found["held_out_loss/D0-w3"] == pytest.approx(loss / 3.0)
    assert found["mean_predicted/D0-w3"] == pytest.approx(0.75)
    assert found["mean_acceptance"] == pytest.approx(0.75)
