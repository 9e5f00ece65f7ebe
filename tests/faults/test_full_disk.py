"""A full disk in the middle of a file: finished files stay, one line names folder and remedy.

A limit on file size simulates the full disk, because the kernel fails the same writes and no
permission to mount a small disk is needed.
"""

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from drafttrain.data.distill import distill as distillation
from drafttrain.data.distill.distill import distill
from drafttrain.data.shards.outputs import ShardRow, write_shard
from drafttrain.data.shards.writing import DiskFull, named_disk_errors
from drafttrain.training.run_folder import save_final
from tests.comparing import same_weights
from tests.data.distill.tiny_distill import settings
from tests.faults.small_run import files, run_training, stopped_run
from tests.tiny_models import tiny_model
from tests.tiny_targets import tiny_tokenizer


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


def test_in_mid_shard(tiny_target, monkeypatch):
    def starved(path: Path, rows: Sequence[ShardRow]) -> None:
        with no_file_larger_than(1000):
            write_shard(path, rows)

    config = settings(tiny_target)
    distill(config)
    whole = files(config.out)
    lost = config.out / "shard-00001.parquet"
    lost.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(distillation, "write_shard", starved)
        with pytest.raises(DiskFull) as error:
            distill(config)
    for word in (str(config.out), "MiB free", "make room and run the same command again"):
        assert word in str(error.value)
    assert files(config.out) == {n: x for n, x in whole.items() if n != lost.name}
    distill(config)
    assert files(config.out) == whole


@pytest.mark.parametrize("file", ["weights.safetensors", "state/optimizer.bin"])
def test_in_mid_checkpoint(tmp_path, file):
    whole = run_training(tmp_path / "whole")
    run = stopped_run(tmp_path / "run")
    before = files(run / "checkpoints")
    size = len(before[f"step-00000003/{file}"])
    with no_file_larger_than(size - 1), pytest.raises(DiskFull) as error:
        run_training(run)
    assert str(run) in str(error.value) and "make room" in str(error.value)
    assert files(run / "checkpoints") == before
    assert [path.name for path in (run / "checkpoints").glob(".*")] == []
    assert same_weights(run_training(run), whole)


def test_in_mid_model(tmp_path):
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
