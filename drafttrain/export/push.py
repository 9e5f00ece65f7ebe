"""Push a verified export to the Hub: the folder as it lies on disk, in one commit."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from drafttrain.config.base import ConfigError
from drafttrain.export.folder import check_name
from drafttrain.models.loading import first_line

STALE = ["acceptance_head/*", "report.png"]
"""Parts of an earlier export that this one may not have."""


def check_push(repository: str) -> None:
    """Refuse what cannot be pushed to, before anything is loaded. Raises ConfigError.

    Asks the Hub whose token it is.
    """
    check_name(repository, "push")
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(
            f"push = {repository!r} is no repository ({error}); give USER/NAME"
        ) from None
    try:
        HfApi().whoami()
    except Exception as error:  # transport errors have no public class of their own
        raise ConfigError(
            f"push = {repository!r}: the Hub cannot be reached or does not know you "
            f"({first_line(error)}); log in with `hf auth login`, or leave --push out and push "
            f"later with `hf upload {repository} OUT`"
        ) from None


def push(folder: Path, repository: str, private: bool) -> str:
    """Upload an export; the commit's address. Raises OSError, the folder being kept."""
    try:
        api = HfApi()
        api.create_repo(repo_id=repository, private=private or None, exist_ok=True)
        return api.upload_folder(
            folder_path=folder,
            repo_id=repository,
            commit_message="Export of drafttrain",
            delete_patterns=STALE,
        )
    except Exception as error:  # transport errors have no public class of their own
        raise OSError(
            f"{str(folder)!r} is exported and verified, but could not be pushed to {repository!r} "
            f"({first_line(error)}); push it with `hf upload {repository} {folder}`"
        ) from error
