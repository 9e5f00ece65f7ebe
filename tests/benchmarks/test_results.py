"""The tables of docs/results.md show their reports, and their settings are valid for decoding."""

import pytest

from benchmarks import results
from drafttrain.config.commands import EvalConfig
from drafttrain.config.reading import load_settings
from tests.evaluation.reports import batched_report


def test_the_page_shows_the_reports_that_are_kept():
    text = results.PAGE.read_text(encoding="utf-8")
    assert results.render_page(text) == text
    shown = {match["name"] for match in results.BLOCK.finditer(text)}
    assert shown == {file.stem for file in results.REPORTS.glob("*.json")}


def test_a_block_holds_the_command_the_machine_and_the_table(tmp_path, monkeypatch):
    report = batched_report()
    (tmp_path / "pair.json").write_text(report.model_dump_json())
    monkeypatch.setattr(results, "REPORTS", tmp_path)
    page = results.render_page("before\n<!-- pair -->\nold\n<!-- end -->\nafter\n")
    assert page.startswith("before\n<!-- pair -->\n    " + report.environment.command)
    assert page.endswith("<!-- end -->\nafter\n") and "old" not in page
    assert "a CPU; 1 thread; float32, 40 inputs; 2026-11-27." in page
    assert "| causal k=3 greedy | 8 | 1.20× (1.08–1.32×) | – |" in page
    assert results.render_page(page) == page


@pytest.mark.parametrize("file", results.REPORTS.glob("*.yaml"), ids=lambda file: file.stem)
def test_settings_of_every_table_can_be_read_and_name_its_report(file):
    settings = load_settings(EvalConfig, file, [])
    assert results.ROOT / settings.report == file.with_suffix(".json")
