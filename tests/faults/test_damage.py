"""Damaged files and full disks: finished files stay, and a named error says what to do.

A limit on file size simulates the full disk, because the kernel fails the same writes and no
permission to mount a small disk is needed.
"""

import resource
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import Tensor

from drafttrain.config.base import ConfigError, Interrupted
from drafttrain.config.commands import DistillConfig
from drafttrain.config.recipes import ObjectiveConfig
from drafttrain.data.distill import distill as distillation
from drafttrain.data.distill.distill import distill
from drafttrain.data.shards.outputs import ShardRow, load_distilled, write_shard
from drafttrain.data.shards.writing import DiskFull, named_disk_errors
from drafttrain.training.checkpoints import CheckpointError
from drafttrain.training.run_folder import open_run, save_final
from tests.comparing import same_weights
from tests.data.distill.tiny_distill import settings
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target, tiny_tokenizer
from tests.training.tiny_runs import SIX_STEPS, small_task, stop_at, train_small

SHARD = "shard-00001.parquet"


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


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """Makes writes beyond this number of bytes in any file fail (EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(autouse=True)
def _output_in_memory(capsys):
    """Captures output in memory, because the limit would also apply to pytest's capture file."""


def files(folder: Path) -> dict[str, bytes]:
    """Returns the contents of all files of a folder by relative path."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def run_training(run: Path, validate: object = None) -> dict[str, Tensor]:
    """Trains a tiny drafter for six steps. Returns the final weights."""
    return train_small(
        small_task(validate, dropout=0.2), SIX_STEPS.model_copy(update={"average": 2}), run
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Tensor]:
    """The weights of an uninterrupted run."""
    return run_training(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run that got SIGTERM in step 3, with checkpoints of steps 2 and 3."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Interrupted, match="stopped at step 3 of 6; .*same command again"):
        run_training(folder, stop_at(3))
    return folder


@pytest.fixture
def run(stopped, tmp_path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_named_with_the_remedy(run, damage):
    newest = run / "checkpoints" / "step-00000003"
    names = files(newest)
    assert len(names) >= 4
    for name, content in names.items():
        damage(newest / name)
        with pytest.raises(CheckpointError) as error:
            run_training(run)
        assert str(newest) in str(error.value)
        (newest / name).write_bytes(content)


def test_without_the_damaged_checkpoint_the_run_ends_with_the_same_weights(run, whole):
    newest = run / "checkpoints" / "step-00000003"
    flip(newest / "state" / "optimizer.bin")
    with pytest.raises(CheckpointError, match="delete it: the run continues from step-00000002"):
        run_training(run)
    shutil.rmtree(newest)
    assert same_weights(run_training(run), whole)


def test_damage_to_an_older_checkpoint_is_found_when_it_is_averaged(run, whole):
    run_training(run)
    older = run / "checkpoints" / "step-00000004"
    flip(older / "weights.safetensors")
    with pytest.raises(CheckpointError, match="step-00000004 is damaged.*and every later one"):
        run_training(run)
    for folder in older.parent.iterdir():
        shutil.rmtree(folder)
    assert same_weights(run_training(run), whole)


@pytest.mark.parametrize("file", ["weights.safetensors", "state/optimizer.bin"])
def test_a_disk_that_is_full_in_mid_checkpoint(run, whole, file):
    before = files(run / "checkpoints")
    size = len(before[f"step-00000003/{file}"])
    with no_file_larger_than(size - 1), pytest.raises(DiskFull) as error:
        run_training(run)
    assert str(run) in str(error.value) and "make room" in str(error.value)
    assert files(run / "checkpoints") == before
    assert [path.name for path in (run / "checkpoints").glob(".*")] == []
    assert same_weights(run_training(run), whole)


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
    target = save_target(tiny_model("marian"), tmp_path_factory.mktemp("distilled") / "target")
    config = settings(target, sentences=12, shard_rows=6, sampling={"max_new_tokens": 8})
    distill(config)
    return config


@pytest.fixture
def copy(distilled, tmp_path) -> DistillConfig:
    """Settings of the same distillation, with a copy of its results."""
    out = Path(shutil.copytree(distilled.out, tmp_path / "out"))
    return distilled.model_copy(update={"out": out})


@pytest.mark.parametrize("name", ["shard-00000.parquet", "manifest.json"])
def test_changed_bytes_are_named_or_change_nothing(distilled, copy, name):
    """At every 41st byte, the byte is flipped or the file truncated there."""
    expected = load_distilled(distilled.out).to_list()
    content = (copy.out / name).read_bytes()
    named = 0
    for place in range(0, len(content), 41):
        changed = bytearray(content)
        changed[place] ^= 0x15
        for spoiled in (bytes(changed), content[:place]):
            (copy.out / name).write_bytes(spoiled)
            try:
                assert load_distilled(copy.out).to_list() == expected
            except ConfigError as error:
                named += 1
                assert str(copy.out) in str(error)
    assert named > len(content) // 41  # at least every truncated file


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_distilling_continues_after_a_damaged_shard_is_deleted(copy, damage):
    whole = files(copy.out)
    damage(copy.out / SHARD)
    if damage is not lose:
        with pytest.raises(ConfigError, match=f"{SHARD} .*delete it and run the same"):
            distill(copy)
        (copy.out / SHARD).unlink()
    distill(copy)
    assert files(copy.out) == whole


def test_a_disk_that_is_full_in_mid_shard(copy, monkeypatch):
    def starved(path: Path, rows: Sequence[ShardRow]) -> None:
        with no_file_larger_than(1000):
            write_shard(path, rows)

    whole = files(copy.out)
    (copy.out / SHARD).unlink()
    with monkeypatch.context() as patched:
        patched.setattr(distillation, "write_shard", starved)
        with pytest.raises(DiskFull) as error:
            distill(copy)
    for word in (str(copy.out), "MiB free", "make room and run the same command again"):
        assert word in str(error.value)
    assert files(copy.out) == {n: x for n, x in whole.items() if n != SHARD}
    distill(copy)
    assert files(copy.out) == whole


def test_a_disk_that_is_full_in_mid_model(tmp_path):
    with no_file_larger_than(10_000), pytest.raises(DiskFull, match="make room"):
        save_final(tmp_path, tiny_model("marian"), tiny_tokenizer())
    assert list(tmp_path.iterdir()) == []
    save_final(tmp_path, tiny_model("marian"), tiny_tokenizer())
    assert (tmp_path / "final" / "model.safetensors").is_file()


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(RuntimeError, match="another reason"), named_disk_errors(tmp_path):
        raise RuntimeError("another reason")
    with pytest.raises(FileNotFoundError), named_disk_errors(tmp_path):
        (tmp_path / "nothing").read_text()
