"""Runs recipes on the CPU, even on a machine with GPUs."""

import pytest


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
