"""Which checkpoints count: those that were due, not those of a run that was asked to stop."""

from __future__ import annotations

from pathlib import Path

from drafttrain.training.checkpoints import Schedule, checkpoint_folders


def test_a_checkpoint_written_on_request_is_not_one_of_those_that_are_due(tmp_path: Path) -> None:
    for step in (4, 5, 8, 9, 10):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".writing-step-00000012").mkdir()
    folders = checkpoint_folders(tmp_path)
    assert len(folders) == 5
    due = Schedule(every=4, total=10, keep=2).due(folders)
    assert [folder.name[-2:] for folder in due] == ["04", "08", "10"]  # the last step always is
