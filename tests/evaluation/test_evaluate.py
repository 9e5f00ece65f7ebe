"""Whole evaluations on tiny random models: facts, comparisons, report, tables, plot."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from drafttrain.build.method import Method
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling, SpecVerification
from drafttrain.evaluation.evaluate import Evaluation, evaluate, write_evaluation
from drafttrain.evaluation.report import Report, read_report
from drafttrain.evaluation.tables import main_table, note, parity_lines
from tests.decoding.drafts import ScriptedDrafter, noisy_blocks
from tests.evaluation.scripted import chain, loaded, options, plain_tokens, rows
from tests.tiny_models import tiny_model

LENGTH = 12
SOURCES = ["w5 w6 w7 w8", "w9 w3 w30", "w12 w12 w20 w33 w4", "w39 w8"]
ROWS = rows(SOURCES, ["w3 w4 w5 w6 w7", "w8 w9", None, "w4"])
ONCE = {"repeats": 1, "warmup": 0}
OPTIONS = options(max_new_tokens=LENGTH, **ONCE)


def script(target, k=4, wrong=0.3):
    """Returns a drafter for SOURCES that is sometimes wrong, and the plain outputs."""
    outputs, blocks = [], {}
    for i, text in enumerate(SOURCES):
        ids = target.target.tokenizer(text).input_ids
        outputs.append(plain_tokens(target.target.model, ids, LENGTH))
        blocks[tuple(ids)] = noisy_blocks(outputs[-1] + [7] * LENGTH, k, wrong, seed=i)
    return ScriptedDrafter(blocks), outputs


def strict(drafter, k=4):
    return Method(drafter, FixedLength(k), GreedyMatch(), {drafter.name: 0.5}, {"k": k})


def loose(drafter):
    return replace(strict(drafter), verifier=SpecVerification(20, 50.0))


def printed(table, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text().splitlines()


@pytest.fixture(scope="module")
def target():
    return loaded(tiny_model("marian"))


@pytest.fixture(scope="module")
def evaluation(target) -> Evaluation:
    (drafter, _), (other, _) = script(target), script(target, wrong=0.6)
    other.name = "worse"
    methods = [strict(drafter), strict(drafter, 2), loose(drafter)]
    methods.append(replace(strict(other, 2), other="bad"))
    return evaluate(target, methods, ROWS, OPTIONS)


@pytest.fixture
def report(evaluation) -> Report:
    return evaluation.report


def test_lossless_greedy_methods_equal_plain_decoding_and_generate(report):
    for name in ("plain", "scripted k=4 greedy", "scripted k=2 greedy"):
        run = report.run(name)
        assert run.lossless and not run.lossy
        assert all(parity.identical == parity.compared == 4 for parity in run.parity)
        assert name == "plain" or run.metrics["consistency_bleu"].value == pytest.approx(100.0)
        assert name == "plain" or run.metrics["bleu_difference"].value == 0.0
    assert [p.against for p in report.run("plain").parity] == ["generate"]
    assert [p.against for p in report.run("scripted k=4 greedy").parity] == ["plain", "generate"]
    assert report.run("generate").metrics["identical"].value == 1.0
    lossless = "scripted k=4 greedy; scripted k=2 greedy; worse k=2 greedy"
    assert parity_lines(report) == [
        f"4 of 4 equal to generate: plain; {lossless}",
        f"4 of 4 equal to plain: {lossless}",
    ]


def test_a_lossy_method_is_marked_and_claims_no_parity(report):
    run = report.run("scripted k=4 spec-verification(20,50.0)")
    assert run.lossy and not run.lossless and run.parity == []
    assert run.metrics["identical"].value < 1.0
    bleu, plain = (one.metrics["bleu"].value for one in (run, report.run("plain")))
    assert run.metrics["bleu_difference"].value == pytest.approx(bleu - plain)
    assert "(lossy)" in main_table(report).markdown()
    assert sum("lossy" in line for line in printed(main_table(report), 300)) == 2  # row, caption


def test_speed_ups_are_over_the_times_of_the_same_inputs(report):
    assert report.run("plain").metrics["speedup"].value == 1.0
    assert report.run("generate").metrics["speedup_vs_generate"].value == 1.0
    assert report.run("generate beam 5").metrics["speedup_vs_beam"].value == 1.0
    ours, plain = (report.run(name).metrics for name in ("scripted k=4 greedy", "plain"))
    ratio = ours["tokens_per_second"].value / plain["tokens_per_second"].value
    assert ours["speedup"].value == pytest.approx(ratio)
    assert {run.batch_size for run in report.runs} == {1}


def test_totals_and_metrics_come_from_the_same_rounds(report):
    run = report.run("scripted k=4 greedy")
    totals, rates = run.totals, run.acceptance_rate_per_position
    assert run.metrics["mean_acceptance_length"].value == totals["tokens"] / totals["rounds"]
    cost = 0.5 * totals["passes"] + totals["rounds"]
    assert run.metrics["mbsu"].value == pytest.approx(totals["tokens"] / cost)
    assert sum(rates.accepted) == totals["accepted"] and sum(rates.drafted) == totals["drafted"]
    assert 0 <= run.time["other"] <= 1


def test_report_json_survives_a_round_trip_and_other_files_are_refused(report, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(report.model_dump_json())
    assert read_report(path) == report
    written = json.loads(path.read_text())["runs"][1]
    assert written["metrics"]["mbsu"].keys() == {"value", "low", "high"}
    assert written["sampling"] == {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    path.write_text('{"runs": []}')
    with pytest.raises(ValueError, match="is no report of drafttrain"):
        read_report(path)


def test_evaluation_writes_report_samples_and_plot_side_by_side(target, evaluation, tmp_path):
    _, outputs = script(target)
    write_evaluation(evaluation, tmp_path / "new" / "report.json")
    files = sorted(file.name for file in (tmp_path / "new").iterdir())
    assert files == ["report.html", "report.json", "report.png", "samples.jsonl"]
    lines = (tmp_path / "new" / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert [sample["row"] for sample in samples] == [10, 11, 12, 13]
    assert samples[2]["reference"] is None
    assert {sample["temperature"] for sample in samples} == {0.0}
    sample = samples[0]["outputs"]["scripted k=4 greedy"]
    emitted = [piece for round in sample["rounds"] for piece in round["emitted"]]
    assert emitted == target.target.tokenizer.convert_ids_to_tokens(outputs[0])
    assert sample["text"] == samples[0]["plain"]
    write_evaluation(replace(evaluation, samples=[]), tmp_path / "new" / "report.json")
    assert not (tmp_path / "new" / "samples.jsonl").exists(), "it is of another report"


def test_chats_have_no_bleu_even_where_answers_are_known(target):
    """Common n-grams do not measure the quality of a chat's answer; equality of outputs does."""
    target = loaded(tiny_model("llama"))
    turns = [[{"role": "user", "content": text}] for text in SOURCES]
    chats = [json.dumps({"conversation": chat}) for chat in turns]
    template = "{% for turn in messages %}{{ turn.content }} {% endfor %}"
    target.target.tokenizer.chat_template = template
    settings = options(baselines=(), **ONCE)
    for data in (ROWS, rows(SOURCES)):
        data = data.add_column("chat", chats)
        found = evaluate(target, [chain(tiny_model("llama", seed=5), 4)], data, settings).report
        for run in found.runs:
            assert not {name for name in run.metrics if "bleu" in name}
        assert found.runs[1].metrics["identical"].value == 1.0
        assert "rougeL" in found.runs[0].metrics or found.data.references == 0
        table = main_table(found).markdown()
        assert "BLEU" not in table and "equal %" in table


def test_sampling_makes_no_identity_claim_and_repeats_with_its_seed(target):
    drafter, _ = script(target)
    settings = options(1.0, baselines=(), **ONCE)
    method = Method(drafter, FixedLength(4), RejectionSampling())
    first, second = (evaluate(target, [method], ROWS, settings) for _ in range(2))
    assert first.samples == second.samples
    run = first.report.runs[1]
    assert run.name == "scripted k=4 rejection" and run.lossless
    assert "identical" not in run.metrics and run.parity == []
    assert "mean_acceptance_length" in run.metrics
    other = evaluate(target, [method], ROWS, options(1.0, baselines=(), seed=1, **ONCE))
    assert other.samples != first.samples


def test_a_narrow_terminal_gets_values_without_intervals(report):
    wide, narrow = (printed(main_table(report), width) for width in (400, 80))
    value = report.run("scripted k=4 greedy").metrics["mean_acceptance_length"]
    interval = f"{value.low:.2f}–{value.high:.2f}"
    assert any(interval in line for line in wide)
    assert not any(interval in line for line in narrow)
    assert any(f"{value.value:.2f}" in line for line in narrow)


def test_inputs_longer_than_the_drafter_takes_are_decoded_plainly_and_counted(target):
    small = CachedModel(target.target.model)
    small.source_limit = 4  # sources have 4, 3, 5 and 2 tokens
    settings = options(max_new_tokens=LENGTH, baselines=(), **ONCE)
    found = evaluate(target, [strict(CausalDrafter(small))], ROWS, settings).report
    assert found.runs[1].totals["too_long"] == 1 and "too_long" not in found.runs[0].totals
    assert "1 input longer than the drafter takes: decoded plainly." in note(found)
