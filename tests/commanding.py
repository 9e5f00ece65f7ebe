"""Runs a command of drafttrain in this process."""

from __future__ import annotations

import pytest

from drafttrain.cli import main


def ended(*arguments: object) -> int:
    """Runs `drafttrain` with these arguments and returns its exit code."""
    with pytest.raises(SystemExit) as leaving:
        main([str(one) for one in arguments])
    return int(leaving.value.code or 0)
