"""Pushing: the verified files, all of them, in one commit; wrong names are refused beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

from drafttrain.config.base import ConfigError
from drafttrain.export.push import check_push, push


class Recorder:
    """Stands where the library's calls to the Hub are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.created: list[dict[str, Any]] = []
        self.uploaded: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        monkeypatch.setattr(HfApi, "create_repo", self.create_repo)
        monkeypatch.setattr(HfApi, "upload_folder", self.upload_folder)
        monkeypatch.setattr(HfApi, "whoami", lambda: {"name": "user"})

    def create_repo(self, **given: Any) -> Any:
        self.created.append(given)
        return type("Url", (), {"repo_id": given["repo_id"]})

    def upload_folder(self, folder_path: Path, **given: Any) -> str:
        self.uploaded.append(given)
        self.files = {
            str(file.relative_to(folder_path)): file.read_bytes()
            for file in Path(folder_path).rglob("*")
            if file.is_file()
        }
        return "https://hub/commit/1"


@pytest.fixture
def hub(monkeypatch) -> Recorder:
    return Recorder(monkeypatch)


@pytest.fixture
def export(tmp_path: Path) -> Path:
    (tmp_path / "export" / "acceptance_head").mkdir(parents=True)
    (tmp_path / "export" / "README.md").write_text("our own card")
    (tmp_path / "export" / "acceptance_head" / "config.json").write_text("{}")
    return tmp_path / "export"


def test_every_file_is_uploaded_as_it_lies_in_one_commit(hub, export):
    assert push(export, "user/mine", private=True) == "https://hub/commit/1"
    assert hub.files == {
        "README.md": b"our own card",
        "acceptance_head/config.json": b"{}",
    }
    assert [given["repo_id"] for given in hub.uploaded] == ["user/mine"]
    assert hub.created[0]["private"] is True
    assert "acceptance_head/*" in hub.uploaded[0]["delete_patterns"]


def test_a_failed_upload_keeps_the_folder_and_says_how_to_go_on(hub, export, monkeypatch):
    def fail(**_: object) -> None:
        raise OfflineModeIsEnabled("offline mode is enabled")

    monkeypatch.setattr(HfApi, "upload_folder", fail)
    with pytest.raises(OSError, match=f"hf upload user/mine {export}"):
        push(export, "user/mine", private=False)
    assert (export / "README.md").is_file()


@pytest.mark.parametrize(
    ("repository", "says"),
    [("a/b/c", "is no repository"), ("user/my mine", "is no repo"), ("user/eagle3-x", "vLLM")],
)
def test_names_that_cannot_be_pushed_to_are_refused(hub, repository, says):
    with pytest.raises(ConfigError, match=says):
        check_push(repository)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (LocalTokenNotFoundError("no token found"), "hf auth login"),
        (OfflineModeIsEnabled("offline mode is enabled"), "cannot be reached"),
        (RuntimeError("name or service not known"), "cannot be reached"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_without_a_token_or_a_connection_nothing_is_begun(monkeypatch, error, says):
    def fail(_: HfApi) -> None:
        raise error

    monkeypatch.setattr(HfApi, "whoami", fail)
    with pytest.raises(ConfigError, match=says):
        check_push("user/mine")
