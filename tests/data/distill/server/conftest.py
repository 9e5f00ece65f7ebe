"""A tiny target, the rows that Transformers distils from it, and a server that knows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafttrain.data.distill.distill import distill
from drafttrain.models.loading import load_target
from tests.data.distill.server.fake import Fake
from tests.data.distill.tiny_distill import rows_of, settings
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    """The target's folder; beside it `out`, what Transformers distils."""
    target = save_target(tiny_model("llama").float(), tmp_path_factory.mktemp("local") / "target")
    distill(settings(target))
    return target


@pytest.fixture(scope="module")
def own_rows(local) -> list[dict]:
    return rows_of(local.parent / "out")


@pytest.fixture
def fake(local, own_rows) -> Fake:
    outputs = {tuple(row["source_ids"]): row["target_ids"] for row in own_rows}
    return Fake(outputs, load_target(settings(local).target).tokenizer)
