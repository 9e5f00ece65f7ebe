"""Truncated, changed or lost files give a named error with a remedy, or the same result."""

import shutil
from pathlib import Path

import pytest

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import DistillConfig
from drafttrain.config.recipes import ObjectiveConfig
from drafttrain.data.distill.distill import distill
from drafttrain.data.shards.outputs import load_distilled
from drafttrain.training.checkpoints import CheckpointError
from drafttrain.training.run_folder import open_run
from tests.comparing import same_weights
from tests.data.distill.tiny_distill import settings
from tests.faults.small_run import run_training, stopped_run
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    """Flips one bit in the first half of a file, where Parquet stores the rows."""
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 16
    path.write_bytes(content)


def lose(path: Path) -> None:
    path.unlink()


DAMAGES = (cut, empty, flip, lose)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return stopped_run(tmp_path_factory.mktemp("damage") / "run")


@pytest.fixture
def copied(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_named_with_the_remedy(copied, damage):
    newest = copied / "checkpoints" / "step-00000003"
    names = [path.relative_to(newest) for path in newest.rglob("*") if path.is_file()]
    assert len(names) >= 4
    for name in names:
        content = (newest / name).read_bytes()
        damage(newest / name)
        with pytest.raises(CheckpointError) as error:
            run_training(copied)
        assert str(newest) in str(error.value)
        (newest / name).write_bytes(content)


def test_without_the_damaged_checkpoint_the_run_ends_with_the_same_weights(copied, tmp_path):
    newest = copied / "checkpoints" / "step-00000003"
    flip(newest / "state" / "optimizer.bin")
    with pytest.raises(CheckpointError, match="delete it: the run continues from step-00000002"):
        run_training(copied)
    shutil.rmtree(newest)
    assert same_weights(run_training(copied), run_training(tmp_path / "whole"))


def test_damage_to_an_older_checkpoint_is_found_when_it_is_averaged(tmp_path):
    whole = run_training(tmp_path / "run")
    older = tmp_path / "run" / "checkpoints" / "step-00000004"
    flip(older / "weights.safetensors")
    with pytest.raises(CheckpointError, match="step-00000004 is damaged.*and every later one"):
        run_training(tmp_path / "run")
    for folder in older.parent.iterdir():
        shutil.rmtree(folder)
    assert same_weights(run_training(tmp_path / "run"), whole)


def test_damaged_settings_of_a_run_are_named(tmp_path):
    open_run(tmp_path, ObjectiveConfig())
    file = tmp_path / "run.yaml"
    for content in (b"", b"- a list", b"a: [", b"\xff\xfe\xff"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="(?s)run.yaml .*delete this file"):
            open_run(tmp_path, ObjectiveConfig())
    file.unlink()
    open_run(tmp_path, ObjectiveConfig())


@pytest.fixture(scope="module")
def distilled(tmp_path_factory) -> DistillConfig:
    folder = tmp_path_factory.mktemp("distilled")
    target = save_target(tiny_model("marian"), folder / "target")
    config = settings(target, sentences=12, shard_rows=6, sampling={"max_new_tokens": 8})
    distill(config)
    return config


@pytest.mark.parametrize("name", ["shard-00000.parquet", "manifest.json"])
def test_changed_bytes_are_named_or_change_nothing(distilled, tmp_path, name):
    """At every 41st byte, the byte is flipped or the file truncated there."""
    expected = load_distilled(distilled.out).to_list()
    copy = Path(shutil.copytree(distilled.out, tmp_path / "out"))
    content = (copy / name).read_bytes()
    named = 0
    for place in range(0, len(content), 41):
        changed = bytearray(content)
        changed[place] ^= 0x15
        for spoiled in (bytes(changed), content[:place]):
            (copy / name).write_bytes(spoiled)
            try:
                assert load_distilled(copy).to_list() == expected
            except ConfigError as error:
                named += 1
                assert str(copy) in str(error)
    assert named > len(content) // 41  # at least every truncated file


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_distilling_continues_after_a_damaged_shard_is_deleted(distilled, tmp_path, damage):
    copy = Path(shutil.copytree(distilled.out, tmp_path / "out"))
    config = distilled.model_copy(update={"out": copy})
    shard = copy / "shard-00001.parquet"
    whole = shard.read_bytes()
    damage(shard)
    if damage is not lose:
        with pytest.raises(ConfigError, match="shard-00001.parquet .*delete it and run the same"):
            distill(config)
        shard.unlink()
    distill(config)
    assert shard.read_bytes() == whole
