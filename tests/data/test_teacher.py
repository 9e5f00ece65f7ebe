"""The cached teacher: the target's own rows, resumed as if never stopped, refused when changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.language_recipes import CausalDrafterRecipe
from drafttrain.data import teacher
from drafttrain.data.batches.examples import TopRows
from drafttrain.data.batches.packing import DocumentCollator
from drafttrain.data.shards.outputs import load_distilled
from drafttrain.data.shards.store import read_manifest
from drafttrain.data.shards.teacher_rows import TeacherManifest
from drafttrain.data.teacher import TaughtExamples, cache_teacher, plan_teacher, top_rows
from drafttrain.decoding.engine.teacher_forcing import teacher_force
from drafttrain.models.loading import load_target
from drafttrain.training.objectives.follow_target import FollowTarget
from tests.comparing import close
from tests.data.hidden.tiny_cache import make_pair
from tests.tiny_models import EOS, VOCAB, tiny_model
from tests.training.objectives.test_follow_target import EVERY

DRAFTABLE = torch.tensor([EOS, *range(5, 30)])
LOGITS = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).log()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(teacher, "SHARD_ROWS", 4)
    return make_pair(tmp_path, "llama")


def settings(pair: Path, **changes) -> CausalDrafterRecipe:
    values = {
        "run": pair / "run",
        "target": {"path": str(pair / "target"), "device": "cpu"},
        "data": {"path": str(pair / "texts.txt")},
        "distilled": pair / "distilled",
        "teacher": {"kind": "cached"} | changes,
        "train": {"batch_tokens": 60},
    }
    return CausalDrafterRecipe.model_validate(values)


def target_of(pair: Path, dtype: str) -> TargetConfig:
    return TargetConfig(path=str(pair / "target"), device="cpu", dtype=dtype)


def cached(pair: Path, draftable: torch.Tensor | None = None, **changes):
    asked = settings(pair, **changes)
    rows, target = load_distilled(pair / "distilled"), load_target(asked.target)
    return cache_teacher(asked, target, rows, draftable), rows, target


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_the_likeliest_tokens_and_what_the_others_have_by_hand() -> None:
    found = top_rows(LOGITS, 2)
    assert found.tokens.tolist() == [[0, 1], [3, 2]]
    close(
        found.log_probs.exp(),
        torch.tensor([[0.5, 0.25, 0.25], [0.4, 0.3, 0.3]], dtype=torch.float64),
    )
    drafted = top_rows(LOGITS, 1, torch.tensor([1, 3]))
    assert drafted.tokens.tolist() == [[1], [3]]
    close(drafted.log_probs.exp(), torch.tensor([[0.25, 0.125], [0.4, 0.2]], dtype=torch.float64))
    assert top_rows(LOGITS, 4).log_probs.shape == (2, 4)  # no others are left


@pytest.mark.parametrize("draftable", [None, DRAFTABLE], ids=["all", "few"])
def test_the_rows_on_disk_are_those_of_the_target_at_every_token_of_an_output(pair, draftable):
    found, rows, target = cached(pair, draftable, top_k=5)
    for number, row in enumerate(rows):
        [forced] = teacher_force(target.model, [row["source_ids"]], [row["target_ids"]])
        expected = top_rows(forced.logits, 5, draftable)
        own = found.read(number)
        close(own.log_probs, expected.log_probs, 1e-5)
        chosen = forced.logits.log_softmax(-1).gather(1, own.tokens)
        close(chosen, expected.log_probs[:, :5], 1e-5)
    manifest = read_manifest(TeacherManifest, pair / "distilled-teacher")
    tokens = sum(map(len, rows["target_ids"]))
    shares = [found.read(number).log_probs[:, :5].exp().sum() for number in range(len(rows))]
    assert manifest.counts == tokens and manifest.shards == 3
    assert manifest.top_k_share == pytest.approx(float(sum(shares)) / tokens)
    size = sum(len(text) for text in files(pair / "distilled-teacher").values())
    plan = plan_teacher(settings(pair, top_k=5), VOCAB, len(rows), tokens)
    assert plan.bytes_a_token == 4 * (5 + 6) and "0.04 KB a token" in str(plan)
    assert 0 <= size - tokens * plan.bytes_a_token < 3 * 300  # and a header a shard


def test_rows_may_be_worked_out_in_another_precision(pair) -> None:
    found, rows, target = cached(pair, top_k=5, dtype="bfloat16")
    half = load_target(target_of(pair, "bfloat16"))
    assert target.model.dtype == torch.float32 and half.model.dtype == torch.bfloat16
    far = []
    for number, row in enumerate(rows):
        exact, rounded = (
            teacher_force(one.model, [row["source_ids"]], [row["target_ids"]])[0].logits
            for one in (target, half)
        )
        own = found.read(number)
        chosen = rounded.float().log_softmax(-1).gather(1, own.tokens)
        close(own.log_probs[:, :5], chosen, 0.05)
        far.append((own.log_probs[:, :5] - exact.log_softmax(-1).gather(1, own.tokens)).abs().max())
    assert max(far) > 1e-4
    with pytest.raises(ConfigError, match="weights_sha256"):
        cached(pair, top_k=5)


@pytest.mark.parametrize("draftable", [None, DRAFTABLE], ids=["all", "few"])
def test_with_all_tokens_kept_it_teaches_what_the_target_does_when_it_is_asked(pair, draftable):
    found, rows, target = cached(pair, draftable, top_k=VOCAB)
    keys = [(0, row) for row in range(len(rows))]
    taught = TaughtExamples(rows, found).__getitems__(keys)
    online = [example._replace(target_rows=None) for example in taught]
    collate, losses, gradients = DocumentCollator(0), [], []
    for examples in (taught, online):
        drafter = tiny_model("llama", seed=5).float()
        objective = FollowTarget(drafter, EVERY, target.model, draftable).train()
        sums = objective(collate([examples[:5], examples[5:]]), 0.0)
        (sums.loss / sums.weight).backward()
        losses.append((sums.loss / sums.weight).detach())
        gradients.append(torch.cat([p.grad.flatten() for p in drafter.parameters()]))
    assert abs(float(losses[0] - losses[1])) <= 1e-6
    close(gradients[0], gradients[1], 1e-6)


def test_caching_that_was_killed_goes_on_to_the_same_bytes(pair, monkeypatch) -> None:
    cached(pair, top_k=5, folder=pair / "whole")
    written, write = [], teacher.write_shard

    def killed(path: Path, outputs: list[TopRows]) -> None:
        if written:
            (path.parent / f".{path.name}-host-1.part").write_text("half")
            raise RuntimeError("killed")
        write(path, outputs)
        written.append(path)

    monkeypatch.setattr(teacher, "write_shard", killed)
    with pytest.raises(RuntimeError, match="killed"):
        cached(pair, top_k=5)
    folder = pair / "distilled-teacher"
    assert len(files(folder)) == 1
    stamp = written[0].stat().st_mtime_ns
    monkeypatch.setattr(teacher, "write_shard", write)
    cached(pair, top_k=5)
    assert files(folder) == files(pair / "whole") and written[0].stat().st_mtime_ns == stamp
    assert not list(folder.glob("*.part")) and not list(folder.glob(".*.part"))


def test_other_settings_another_target_and_a_damaged_shard_are_refused(pair) -> None:
    cached(pair, top_k=5)
    refused = [({"top_k": 6}, None, "top_k = 5"), ({"top_k": 5}, DRAFTABLE, "draftable = 40")]
    for changes, draftable, words in refused:
        with pytest.raises(ConfigError, match=words) as told:
            cached(pair, draftable, **changes)
        assert "teacher.folder=" in str(told.value) and "\n" not in str(told.value)
    rows, other = load_distilled(pair / "distilled"), load_target(settings(pair).target)
    with torch.no_grad():
        other.model.lm_head.weight += 1
    with pytest.raises(ConfigError, match="target.weights_sha256"):
        cache_teacher(settings(pair, top_k=5), other, rows, None)
    with pytest.raises(ConfigError, match="rows = 9|outputs_sha256"):
        cache_teacher(
            settings(pair, top_k=5), load_target(settings(pair).target), rows.select([0]), None
        )
    shard = pair / "distilled-teacher" / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="delete it and run the same command again"):
        cached(pair, top_k=5)


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(pair, monkeypatch) -> None:
    free = type("Usage", (), {"free": 100})
    monkeypatch.setattr(teacher.shutil, "disk_usage", lambda folder: free)
    with pytest.raises(ConfigError, match=r"free there; use a smaller teacher.top_k"):
        cached(pair, top_k=5)
    assert not (pair / "distilled-teacher").exists()


def test_shards_hold_plain_tensors(pair) -> None:
    cached(pair, top_k=5)
    held = load_file(pair / "distilled-teacher" / "shard-00000.safetensors")
    assert {name: tensor.dtype for name, tensor in held.items()} == {
        "tokens": torch.int32,
        "log_probs": torch.float32,
    }
