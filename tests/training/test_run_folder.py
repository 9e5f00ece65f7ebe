"""A run resumes only with the settings that it was started with, in one process at a time."""

import pytest
from filelock import FileLock

from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import ObjectiveConfig, TargetRecipe, TrainConfig
from drafttrain.data.shards.writing import LOCK
from drafttrain.training.run_folder import check_run, open_run


def test_other_settings_and_settings_that_no_longer_exist_are_refused_by_name(tmp_path):
    open_run(tmp_path, ObjectiveConfig(blocks=3))
    with pytest.raises(ConfigError, match=r"blocks=3, not 2"):
        check_run(tmp_path, ObjectiveConfig(blocks=2))
    with (tmp_path / "run.yaml").open("a") as file:
        file.write("gone: 7\n")
    with pytest.raises(ConfigError, match=r"gone=7, not None"):
        check_run(tmp_path, ObjectiveConfig(blocks=3))


def test_settings_of_the_training_are_free_until_the_first_checkpoint(tmp_path):
    recipe = TargetRecipe(run=tmp_path, data={"path": "texts"}, model={"model_type": "t5"})
    larger = recipe.model_copy(update={"train": TrainConfig(batch_tokens=99, learning_rate=1e-4)})
    open_run(tmp_path, recipe)
    check_run(tmp_path, larger)
    with pytest.raises(ConfigError, match="vocab_size=4000, not 7"):
        check_run(tmp_path, recipe.model_copy(update={"vocab_size": 7}))
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"train.batch_tokens=4096, not 99"):
        check_run(tmp_path, larger)
    check_run(tmp_path, recipe.model_copy(update={"train": TrainConfig(workers=2)}))


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
