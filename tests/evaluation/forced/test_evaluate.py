"""Reports of acceptance along the target's own outputs: by hand, and as of decoding."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from matplotlib.figure import Figure
from rich.console import Console

from drafttrain.build.method import Method
from drafttrain.config.kinds import KINDS, DrafterKind
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Sampling
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling
from drafttrain.evaluation.evaluate import evaluate
from drafttrain.evaluation.forced.evaluate import evaluate_teacher_forced
from drafttrain.evaluation.forced.tables import drafter_table, markdown_drafters, position_table
from drafttrain.evaluation.options import EvaluationOptions
from drafttrain.evaluation.plots import acceptance_panel, choose_panels, length_bars
from drafttrain.evaluation.report import Report, read_report, write_json
from drafttrain.evaluation.served.tables import served_table, synthetic_lines
from tests.evaluation.scripted import ScriptedDrafter, loaded, plain_tokens
from tests.tiny_models import near_copy, tiny_model

LENGTH = 12
SOURCES = ["w5 w6 w7 w8", "w9 w3 w30", "w12 w12 w20 w33 w4", "w39 w8"]
ROWS = Dataset.from_dict({"row": [10, 11, 12, 13], "source": SOURCES, "reference": [None] * 4})
OPTIONS = EvaluationOptions(
    max_new_tokens=LENGTH, repeats=1, warmup=0, bootstrap=50, baselines=(), timing_prompts=2
)
SCRIPTED = DrafterKind(
    name="scripted",
    words="a script",
    described="is a script",
    opens="",
    drafts="blocks",
    probs_along="drafttrain.decoding.drafters.along:proposed_along",
)


@pytest.fixture
def scripts(monkeypatch):
    """Scripts are a kind of drafter that draft blocks."""
    monkeypatch.setitem(KINDS, "scripted", SCRIPTED)


def report_of(target, methods, options=OPTIONS) -> Report:
    model = CachedModel(target.model)
    return evaluate_teacher_forced(target, model, methods, ROWS, options, "data/tiny.txt")


def scripted(target, right: bool, k: int = 3) -> ScriptedDrafter:
    """Blocks that are all right, or all wrong."""
    blocks = {}
    for text in SOURCES:
        ids = target.tokenizer(text).input_ids
        tokens = plain_tokens(target.model, ids, LENGTH)
        assert len(tokens) == LENGTH
        padded = torch.tensor(tokens + [0] * k) + (0 if right else 1)
        blocks[tuple(ids)] = padded.unfold(0, k, 1)
    return ScriptedDrafter(blocks)


def chain(drafter, k=3, name=None, ratio=0.5, rule=None) -> Method:
    label = None if name is None else f"{name} k={k}"
    ratios, settings = {drafter.name: ratio}, {"k": k}
    rule = rule or GreedyMatch()
    return Method(drafter, FixedLength(k), rule, ratios, settings, label, name, parameters=1000)


def test_lengths_and_memory_bound_speed_ups_by_hand(scripts):
    target = loaded(tiny_model("marian"))
    target.model.generation_config.min_new_tokens = LENGTH
    methods = [chain(scripted(target, True)), chain(scripted(target, False), name="bad")]
    plain, good, bad = report_of(target, methods).runs
    # 4 outputs of 12 tokens; 3 of a draft and one more a round: 3 rounds each
    assert (plain.totals["rounds"], plain.totals["tokens"]) == (48, 48)
    assert (good.totals["rounds"], good.totals["drafted"], good.totals["passes"]) == (12, 36, 12)
    assert good.metrics["mean_acceptance_length"].value == pytest.approx(4.0)
    assert good.metrics["mbsu"].value == pytest.approx(48 / (12 + 0.5 * 12))
    # the last of 12 rounds has no room for a draft, the one before for one token, then for two
    assert (bad.totals["rounds"], bad.totals["passes"]) == (48, 44)
    assert bad.totals["drafted"] == 4 * (9 * 3 + 2 + 1)
    assert bad.metrics["mean_acceptance_length"].value == 1.0
    assert bad.metrics["mbsu"].value == pytest.approx(48 / (48 + 0.5 * 44))
    assert bad.compared_with == good.name and bad.parameters == 1000
    difference = bad.metrics["mean_acceptance_length_difference"]
    assert difference.value == difference.low == difference.high == pytest.approx(-3.0)
    assert bad.metrics["mbsu_difference"].value == pytest.approx(48 / 70 - 48 / 18)
    rates = good.acceptance_rate_per_position
    assert [rate.value for rate in rates.conditional] == [1.0, 1.0, 1.0]
    assert bad.acceptance_rate_per_position.conditional[0].value == 0.0
    for run in (good, bad):
        assert run.metrics["draft_time"].value > 0 and run.costs.measured["scripted"] > 0


def language_pair():
    target = loaded(tiny_model("llama"))
    models = [near_copy(target.model, noise, seed=2) for noise in (0.02, 0.1)]
    return target, [CausalDrafter(CachedModel(model)) for model in models], models


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_drafters_in_one_run_are_as_in_two_runs(temperature, tmp_path):
    target, (first, second), models = language_pair()
    options = replace(OPTIONS, sampling=Sampling(temperature), timing_prompts=0)
    rule = RejectionSampling() if temperature else GreedyMatch()
    own = replace(chain(first, rule=rule), assistant=models[0])
    other = replace(chain(second, name="other", rule=rule), assistant=models[1])
    copied = chain(MaxGramDrafter(), name="copied", ratio=0.0, rule=rule)
    together = report_of(target, [own, other, copied], options)
    alone = [report_of(target, [one], options) for one in (own, other, copied)]
    for run, single in zip(together.runs[1:], alone, strict=True):
        [_, expected] = single.runs
        assert run.totals == pytest.approx(expected.totals)
        for name, estimate in expected.metrics.items():
            found = run.metrics[name]
            assert [found.value, found.low, found.high] == pytest.approx(
                [estimate.value, estimate.low, estimate.high]
            )
    served = [run for single in alone for run in single.served]
    assert [(run.drafter, run.rule) for run in together.served] == [
        (run.drafter, run.rule) for run in served
    ]
    for run, expected in zip(together.served, served, strict=True):
        assert run.totals == pytest.approx(expected.totals)
    write_json(together, tmp_path / "report.json")
    assert read_report(tmp_path / "report.json") == together


def test_servers_are_foretold_of_the_whole_vocabulary_though_few_tokens_are_drafted_here():
    target, (whole, _), models = language_pair()
    few = CausalDrafter(CachedModel(models[0], draftable=torch.arange(8, 16)))
    options = replace(OPTIONS, timing_prompts=0)
    ours, trimmed = (
        report_of(target, [replace(chain(drafter), assistant=models[0])], options)
        for drafter in (whole, few)
    )
    [expected], [found] = ours.served, trimmed.served
    assert found.totals == expected.totals
    assert ours.runs[1].totals["accepted"] > trimmed.runs[1].totals["accepted"]


def test_greedy_acceptance_is_that_of_decoding_to_the_last_count():
    target, (first, second), _ = language_pair()
    methods = [chain(first), chain(second, name="other"), chain(MaxGramDrafter(), name="copied")]
    model, options = CachedModel(target.model), replace(OPTIONS, timing_prompts=0)
    decoded = evaluate(target, model, methods, ROWS, options, "data/tiny.txt").report
    forced = report_of(target, methods, options)
    for run in decoded.runs:
        same = forced.run(run.name)
        assert (same.other, same.stop, same.verifier) == (run.other, run.stop, run.verifier)
        for name in ("tokens", "rounds", "accepted"):
            assert same.totals[name] == run.totals[name]
        name = "mean_acceptance_length_difference"
        assert same.metrics.get(name) == run.metrics.get(name)


def test_methods_of_one_name_are_refused():
    target, (first, second), _ = language_pair()
    with pytest.raises(ValueError, match="same name: causal k=3 greedy"):
        report_of(target, [chain(first), chain(second)], replace(OPTIONS, timing_prompts=0))


@pytest.fixture(scope="module")
def report() -> Report:
    target, (first, second), models = language_pair()
    rule, copied = RejectionSampling(), MaxGramDrafter()
    drafters = ((first, None, models[0]), (second, "a start that is long", models[1]))
    methods = [
        replace(chain(drafter, k, name, rule=rule), assistant=model)
        for drafter, name, model in (*drafters, (copied, "copied", None))
        for k in (2, 4)
    ]
    return report_of(target, methods, replace(OPTIONS, sampling=Sampling(1.0)))


def printed(table, width: int) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [80, 100, 120])
def test_tables_have_a_row_for_each_method_whole_at_usual_widths(report, width):
    for table in (drafter_table(report), position_table(report), served_table(report)):
        lines = printed(table, width)
        assert not any("…" in line for line in lines if "k=" in line)
        assert all(len(line) <= width for line in lines)
    shown = "\n".join(printed(drafter_table(report), width))
    for run in report.runs[1:]:
        assert run.name.split(" rejection")[0] in shown
    assert (
        "acceptance" in shown
        and "MBSU" in shown
        and "SWI" in shown
        and "Sampled: expected" in " ".join(shown.split())
    )


def test_lines_of_served_settings_name_the_drafter(report):
    assert any(
        line.startswith("synthetic, a start that is long, ") for line in synthetic_lines(report)
    )
    assert len(markdown_drafters(report).splitlines()) == 2 + 6


def test_one_panel_has_all_drafters_by_position(report):
    axis = Figure().subplots()
    assert acceptance_panel in choose_panels(report)
    acceptance_panel(axis, report)
    labels = axis.get_legend_handles_labels()[1]
    assert labels[:3] == ["causal k=4 rejection", "a start that is long k=4", "copied k=4"]
    single = report.model_copy(
        update={"runs": [r for r in report.runs if r.settings.get("k") != 2]}
    )
    assert length_bars in choose_panels(single)
