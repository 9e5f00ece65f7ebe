"""A run resumes only with the settings that it was started with."""

import pytest

from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import ObjectiveConfig, TargetRecipe, TrainConfig
from drafttrain.training.run_folder import check_run, open_run


def test_other_settings_are_refused_by_name(tmp_path):
    open_run(tmp_path, ObjectiveConfig(blocks=3))
    with pytest.raises(ConfigError, match=r"blocks=3, not 2"):
        check_run(tmp_path, ObjectiveConfig(blocks=2))


def test_a_setting_that_no_longer_exists_is_named(tmp_path):
    open_run(tmp_path, ObjectiveConfig())
    file = tmp_path / "run.yaml"
    file.write_text(file.read_text() + "gone: 7\n")
    with pytest.raises(ConfigError, match=r"gone=7, not None"):
        check_run(tmp_path, ObjectiveConfig())


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
