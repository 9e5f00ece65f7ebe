"""Two processes and one run folder: the second is refused by name."""

import pytest
from filelock import FileLock

from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import ObjectiveConfig
from drafttrain.data.shards.writing import LOCK
from drafttrain.training.run_folder import open_run


def test_a_run_is_refused_while_another_works_on_it_and_then_cleared_of_half_written_files(
    tmp_path,
):
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    open_run(tmp_path / "other", ObjectiveConfig())  # another run folder is free
    half = checkpoints / ".writing-step-00000007"
    half.mkdir(parents=True)
    (half / "weights.safetensors").write_bytes(b"half")
    (checkpoints / ".deleting-step-00000001").mkdir()
    (checkpoints / "step-00000006").mkdir()
    with FileLock(run / LOCK):
        with pytest.raises(ConfigError, match=f"writing to '{run}'.* another folder with run="):
            open_run(run, ObjectiveConfig())
        assert half.exists() and not (run / "run.yaml").exists()
    open_run(run, ObjectiveConfig())  # the lock ended with its holder
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000006"]
    open_run(run, ObjectiveConfig())  # this process may open its own run again
