"""A run goes on with the settings it was begun with, and with no others."""

from __future__ import annotations

import pytest

from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import ObjectiveConfig
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
