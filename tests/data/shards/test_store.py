"""Folders of shards: those of the last version load and are gone on with; shares for every kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import CacheConfig, DistillConfig
from drafttrain.data.distill.distill import distill
from drafttrain.data.hidden.cache import build_cache
from drafttrain.data.shards.outputs import Manifest, load_distilled, read_manifest
from drafttrain.data.shards.states import CacheManifest, open_cache, read_cache_manifest
from drafttrain.data.shards.store import MANIFEST, check_same_settings, write_manifest

ROOT = Path(__file__).parents[3]
WRITTEN = Path(__file__).parent / "last_version"
"""Three prompts of data/functions/val.jsonl.gz, distilled and cached by the version before this
one, with the models in checkpoints/."""
TARGET = {"path": "checkpoints/functions-target", "device": "cpu"}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folders, as seen from the root of the repository."""
    shutil.copytree(WRITTEN, tmp_path / "written")
    monkeypatch.chdir(ROOT)
    return tmp_path / "written"


def distilling(folder: Path, **changes) -> DistillConfig:
    values = {
        "target": TARGET,
        "data": {"path": "data/functions/val.jsonl.gz", "limit": 3},
        "out": folder / "distilled",
        "method": "sample",
        "sampling": {"temperature": 1.0, "top_k": 50, "max_new_tokens": 4},
        "shard_rows": 2,
    }
    return DistillConfig.model_validate(values | changes)


def caching(folder: Path, **changes) -> CacheConfig:
    values = {
        "target": TARGET,
        "drafter": "checkpoints/functions-drafter",
        "distilled": folder / "distilled",
        "out": folder / "cache",
        "state": "token",
        "mixing": 0.3,
        "mixes": 2,
        "dtype": "float16",
        "shard_rows": 2,
    }
    return CacheConfig.model_validate(values | changes)


def test_folders_of_the_last_version_load():
    assert load_distilled(WRITTEN / "distilled")["row"][:] == [0, 1, 2]
    cache = open_cache(WRITTEN / "cache")
    hidden, acceptance = cache.read(0, [0, 1, 2])
    assert hidden.shape == (6, 128) and len(acceptance) == 6


@pytest.mark.parametrize(
    ("name", "read"), [("distilled", read_manifest), ("cache", read_cache_manifest)]
)
def test_manifests_say_all_that_the_last_version_wrote(tmp_path: Path, name: str, read):
    """In the same order; fields that came later have their defaults."""
    write_manifest(tmp_path, read(WRITTEN / name))
    before, now = (
        json.loads((folder / MANIFEST).read_text()) for folder in (WRITTEN / name, tmp_path)
    )
    assert json.dumps(only_known(now, before)) == json.dumps(before)


def only_known(now: object, before: object) -> object:
    """What is now, without fields that were not there before."""
    if not isinstance(now, dict) or not isinstance(before, dict):
        return now
    return {name: only_known(value, before[name]) for name, value in now.items() if name in before}


def test_folders_of_the_last_version_are_gone_on_with(written: Path):
    manifests = read_manifest(written / "distilled"), read_cache_manifest(written / "cache")
    rows, states = load_distilled(written / "distilled")[:], open_cache(written / "cache")
    expected = states.read(1, [0, 1, 2])
    (written / "distilled" / "shard-00001.parquet").unlink()
    assert distill(distilling(written)).counts == manifests[0].counts
    assert load_distilled(written / "distilled")[:] == rows
    (written / "cache" / "mix-1" / "shard-00000.safetensors").unlink()
    again = build_cache(caching(written))
    assert again.counts == manifests[1].counts
    assert again.mean_acceptance == pytest.approx(manifests[1].mean_acceptance, abs=1e-6)
    found = open_cache(written / "cache").read(1, [0, 1, 2])
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-2


def test_a_cause_is_named_before_what_follows_from_it(written: Path):
    there = read_manifest(written / "distilled")
    other = {"inputs_sha256": "other", "rows": 2, "data": there.data | {"limit": 2}}
    with pytest.raises(ConfigError, match=r"data.limit = 3, but .* 2; go back to the old value"):
        check_same_settings(written, there, there.model_copy(update=other))
    cached = read_cache_manifest(written / "cache")
    wide = {"hidden_size": 134, "state": "drawn"}
    with pytest.raises(ConfigError, match="state = 'token', but the settings now say 'drawn'"):
        check_same_settings(written, cached, cached.model_copy(update=wide))


def test_settings_that_came_later_had_their_defaults(written: Path):
    now = read_manifest(written / "distilled")
    before = now.model_copy(
        update={"data": {key: value for key, value in now.data.items() if key != "splices"}}
    )
    check_same_settings(written, before, now)
    changed = now.model_copy(update={"data": now.data | {"splices": 2}})
    with pytest.raises(ConfigError, match="data.splices = 0, but the settings now say 2"):
        check_same_settings(written, before, changed)


@pytest.mark.parametrize("kind", [Manifest, CacheManifest], ids=["distilled", "cache"])
def test_the_last_shard_may_have_fewer_rows(kind: type):
    manifest = kind.model_construct(rows=5, shard_rows=2)
    assert manifest.shards == 3
    assert [list(manifest.rows_of(shard)) for shard in range(3)] == [[0, 1], [2, 3], [4]]


def test_launches_share_a_cache_as_they_share_a_distillation(
    written: Path, capsys: pytest.CaptureFixture
):
    whole = build_cache(caching(written, out=written / "whole"))
    first, second = (caching(written, out=written / "shared", share=f"{i}/2") for i in (0, 1))
    assert build_cache(first).counts is None
    assert "1 of 2 shards are still missing" in capsys.readouterr().err
    leftover = written / "shared" / "mix-0" / ".shard-00000.safetensors-there-1.part"
    leftover.touch()
    assert build_cache(second) == whole
    assert leftover.exists()  # of the other share
    for file in (written / "whole").rglob("shard-*"):
        shared = written / "shared" / file.relative_to(written / "whole")
        assert shared.read_bytes() == file.read_bytes()
