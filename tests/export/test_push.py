"""Pushing: the verified files, all of them, in one commit; wrong names are refused beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

from drafttrain.config.base import ConfigError
from drafttrain.export.folder import check_push, push


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "export" / "acceptance_head").mkdir(parents=True)
    (tmp_path / "export" / "README.md").write_text("our own card")
    return tmp_path / "export"


def test_the_folder_is_uploaded_as_it_lies_in_one_commit(folder, monkeypatch):
    calls: list[tuple[str, dict[str, Any]]] = []

    def recorded(name: str):
        return lambda _, **given: calls.append((name, given)) or "https://hub/commit/1"

    for name in ("create_repo", "upload_folder"):
        monkeypatch.setattr(HfApi, name, recorded(name))
    assert push(folder, "user/mine", private=True) == "https://hub/commit/1"
    [(_, created), (_, uploaded)] = calls
    assert created == {"repo_id": "user/mine", "private": True, "exist_ok": True}
    assert (uploaded["folder_path"], uploaded["repo_id"]) == (folder, "user/mine")
    assert "acceptance_head/*" in uploaded["delete_patterns"]  # of an earlier export


def failing(error: Exception):
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_failed_upload_keeps_the_folder_and_says_how_to_go_on(folder, monkeypatch):
    monkeypatch.setattr(HfApi, "create_repo", lambda *_, **__: None)
    monkeypatch.setattr(HfApi, "upload_folder", failing(OfflineModeIsEnabled("offline")))
    with pytest.raises(OSError, match=f"hf upload user/mine {folder}"):
        push(folder, "user/mine", private=False)
    assert (folder / "README.md").is_file()


@pytest.mark.parametrize(
    ("repository", "error", "says"),
    [
        ("user/my mine", None, "Repo id must"),
        ("user/eagle3-x", None, "vLLM"),
        ("user/mine", LocalTokenNotFoundError("no token found"), "hf auth login"),
        ("user/mine", RuntimeError("name or service not known"), "cannot be pushed to"),
    ],
)
def test_wrong_names_and_a_hub_that_takes_nothing_are_refused(monkeypatch, repository, error, says):
    monkeypatch.setattr(HfApi, "whoami", failing(error) if error else lambda _: {"name": "user"})
    with pytest.raises(ConfigError, match=says):
        check_push(repository)
