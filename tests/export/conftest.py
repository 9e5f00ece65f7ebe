"""A drafter, a head that stops some of its drafts early, and their export, for reading only."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from drafttrain.export import verify
from tests.export.pairs import export_to, noisy_copy, save_drafter, save_head


@pytest.fixture(autouse=True, scope="package")
def _quick_checks() -> Iterator[None]:
    """Exports are verified on four short drafts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "INPUTS", 4)
        patch.setattr(verify, "NEW_TOKENS", 8)
        yield


@pytest.fixture(scope="session")
def drafter(tmp_path_factory) -> Path:
    return save_drafter(tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="session")
def head(tmp_path_factory) -> Path:
    return save_head(tmp_path_factory.mktemp("head"), noisy_copy("llama"))


@pytest.fixture(scope="session")
def exported(tmp_path_factory, drafter, head) -> Path:
    """The export, moved after writing."""
    root = tmp_path_factory.mktemp("exported")
    return export_to(root / "out", drafter=str(drafter), head=head).rename(root / "moved")
