"""`drafttrain tune-cascade` on tiny models: what it writes, and what it refuses in one line."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import yaml

from drafttrain.evaluation.bootstrap import draw_resamples, estimate_ratio
from drafttrain.evaluation.cascades.report import CascadeReport, regret
from drafttrain.evaluation.cascades.search import swi
from drafttrain.evaluation.report import read_report
from tests.commanding import ended
from tests.evaluation.cascades.replays import ToyReplay, toy
from tests.export.pairs import noisy_copy
from tests.refusals.refusing import recorded
from tests.tiny_models import tiny_model
from tests.tiny_targets import random_sentences, save_target

PAIR = ["--target", "llama", "--drafter", "base", "--data", "dev.txt"]
SEARCH = [
    *("--cascade", "small,max-gram", "--leniency", "1,2"),
    *("candidates=12", "first_prompts=2", "finalists=2", "bootstrap=50"),
    "sampling.max_new_tokens=16",
]
SHORT = ["baselines=[]", "repeats=1", "warmup=0", "bootstrap=50"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tune-cascade")
    save_target(tiny_model("llama").float(), root / "llama")
    save_target(noisy_copy("llama", 0.05).float(), root / "base")
    save_target(noisy_copy("llama", 0.3).float(), root / "small")
    for name, texts in (("dev", random_sentences(7)[2:]), ("test", random_sentences(12)[9:])):
        (root / f"{name}.txt").write_text("".join(f"{text}\n" for text in texts))
    return root


@pytest.fixture(scope="module")
def searched(project: Path) -> CascadeReport:
    """With stated costs, and the winner reported on other prompts."""
    with contextlib.chdir(project):
        report_data = ["--report-data", "test.txt", "costs=parameters"]
        assert ended("tune-cascade", *PAIR, *SEARCH, *report_data) == 0
        return CascadeReport.model_validate_json((Path("tune-cascade.json")).read_text())


def test_candidates_are_ranked_by_swi_from_their_calls_and_the_costs(searched: CascadeReport):
    assert searched.costs == {"base": 1.0, "small": 1.0, "max-gram": 0.0}  # of the target's size
    full = [one for one in searched.candidates if one.prompts == 5]
    values = [one.metrics["swi"].value for one in full]
    assert values == sorted(values, reverse=True)
    assert searched.best == full[0].name
    assert {searched.default, searched.first_alone} <= {one.name for one in full}
    for one in searched.candidates:
        spent = one.target_calls + one.calls.get("base", 0) + one.calls.get("small", 0)
        assert one.metrics["swi"].value == pytest.approx(one.tokens / spent)
        assert one.metrics["mean_acceptance_length"].value == pytest.approx(
            one.tokens / one.target_calls
        )
    assert searched.rungs[0].candidates == 12 and searched.rungs[0].prompts == 2
    assert searched.seconds > 0 and searched.timing_prompts == 0


def test_regret_is_what_is_missing_to_the_best(searched: CascadeReport):
    best = searched.find(searched.best).metrics
    assert best["regret"].value == best["regret"].low == best["regret"].high == 0.0
    for name in (searched.default, searched.first_alone):
        one = searched.find(name).metrics
        assert one["regret"].value == pytest.approx(1 - one["swi"].value / best["swi"].value)
        assert one["regret"].low <= one["regret"].value <= one["regret"].high
    with pytest.raises(ValueError, match="were not tried"):
        searched.find("99,99,99/9,9/9")


def test_regret_of_equal_outputs_is_zero_and_of_half_as_good_ones_a_half():
    outputs = {k: [ToyReplay()(i, [toy(k)])[0] for i in range(4)] for k in (2, 4)}
    resamples, costs = draw_resamples(4, 20), {"toy": 0.0}
    assert regret(outputs[2], outputs[4], costs, resamples).value == pytest.approx(0.5)
    assert regret(outputs[4], outputs[4], costs, resamples).value == 0.0
    assert estimate_ratio(swi(outputs[4], costs), resamples).value == 4.0


def test_the_choice_is_reported_on_other_prompts(searched: CascadeReport):
    assert searched.reported_data.path == "test.txt"
    names = [one.name for one in searched.reported]
    assert names[0] == searched.best
    assert set(names) == {searched.best, searched.default, searched.first_alone}
    assert {one.prompts for one in searched.reported} == {3}
    assert searched.data.path == "dev.txt" and searched.data.prompts == 5


def test_models_are_called_less_often_than_decoding_asks(searched: CascadeReport):
    assert set(searched.replayed) == {"target", "base", "small"}
    target = searched.replayed["target"]
    assert target.made < target.asked / 4


def test_eval_runs_the_file_as_it_stands_and_measures_the_same(searched: CascadeReport, inside):
    best = searched.find(searched.best)
    assert ended("eval", "--config", "cascade.yaml", "--data", "dev.txt", *SHORT) == 0
    found = read_report(
        Path("base/report.json" if Path("base/run.yaml").exists() else "report.json")
    )
    _, measured = found.runs
    assert measured.metrics["mbsu"].value == pytest.approx(best.metrics["swi"].value)
    for name in ("tokens", "rounds"):
        assert measured.totals[name] == (best.tokens, best.target_calls)[name == "rounds"]
    assert measured.metrics["identical"].value == 1.0
    made = {name: count for name, count in measured.costs.calls.items() if count}
    assert made == {name: count for name, count in best.calls.items() if count}


def test_the_file_holds_target_and_cascade_and_says_what_it_rests_on(
    searched: CascadeReport, inside
):
    text = Path("cascade.yaml").read_text()
    content = yaml.safe_load(text)
    best = searched.find(searched.best)
    assert content["target"] == {"path": "llama"}
    assert content["decode"]["drafter"] == "base"
    assert content["decode"]["cascade"]["drafters"] == ["small", "max-gram"]
    assert content["decode"]["cascade"]["increments"] == best.increments
    assert content["decode"]["cascade"].get("leniency", 1.0) == best.leniency
    assert content["decode"]["sampling"] == {"max_new_tokens": 16}
    about = [line for line in text.splitlines() if line.startswith("# ")]
    for words in ("target: llama", "base 1.0000", "5 inputs of dev.txt", "machine: "):
        assert any(words in line for line in about)


def test_costs_are_measured_where_they_are_not_stated(inside):
    out = ["--out", "measured.yaml", "timing_prompts=2", "candidates=4", "local=false"]
    assert ended("tune-cascade", *PAIR, *SEARCH, "--temperature", "1", *out) == 0
    found = CascadeReport.model_validate_json((Path("measured.tune-cascade.json")).read_text())
    assert set(found.costs) == {"base", "small", "max-gram"}
    assert all(cost > 0 for cost in found.costs.values())
    assert found.costs_from == "measured" and found.timing_prompts == 2
    assert found.reported == [] and found.reported_data is None
    assert json.loads(Path("measured.tune-cascade.json").read_text())["sampling"] == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
    }
    assert yaml.safe_load(Path("measured.yaml").read_text())["decode"]["sampling"] == {
        "temperature": 1.0,
        "max_new_tokens": 16,
    }


def test_a_level_that_made_no_call_has_no_cost(inside, capsys):
    assert (
        ended("tune-cascade", *PAIR, *SEARCH, "sampling.max_new_tokens=1", "--out", "n.yaml") == 2
    )
    error = capsys.readouterr().err.splitlines()[-1]
    assert "'base' made no call" in error and "costs=parameters" in error
    assert not Path("n.yaml").exists()


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(inside, capsys):
    with recorded() as loaded:
        code = ended("tune-cascade", *PAIR, *SEARCH, "--out", "planned.yaml", "--dry-run")
    out = capsys.readouterr().out
    assert code == 0 and not loaded
    for words in ("base, small, max-gram", "12, on 2 prompts first", "1, 2", "5 of dev.txt"):
        assert words in out
    assert "planned.yaml, planned.tune-cascade.json" in out
    assert not list(Path().glob("planned*"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cascade", ""], ("drafter ''", "give the folder")),
        (["--leniency", "0.5"], ("leniency.0 = '0.5'", "or equal to 1")),
        (["--leniency", "1,x"], ("leniency.1 = 'x'", "number")),
        (["--cascade", "max-gram"], ("leniency = 2.0", "reviews another model's tokens")),
        (["--cascade", "max-gram,small"], ("'max-gram' is the smallest there is",)),
        (["--cascade", "base,max-gram"], ("'base' is twice", "once")),
        (["--drafter", "none"], ("'none' drafts nothing",)),
        (["--drafter", "./absent"], ("'./absent'",)),
        (["--data", "absent.txt"], ("data.path = 'absent.txt'", "no such file")),
        (["--report-data", "absent.txt"], ("report_data.path = 'absent.txt'",)),
        (["--out", "cascade.json"], ("out = 'cascade.json'", ".yaml")),
        (["--out", "dev.txt/cascade.yaml"], ("dev.txt' is a file, not a folder",)),
        (["candidates=1"], ("candidates = 1", "greater than or equal to 2")),
        (["costs=guessed"], ("costs = 'guessed'", "'parameters'")),
        (["candidate=9"], ("did you mean 'candidates'?",)),
        (["bigrams=table.safetensors", "--cascade", "small"], ("bigrams", "leave it out")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_ends_in_one_line_before_weights_load(inside, capsys, arguments, says):
    before = sorted(Path().rglob("*"))
    with recorded() as loaded:
        assert ended("tune-cascade", *PAIR, *SEARCH, *arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    for words in says:
        assert words in line
    assert not loaded
    assert sorted(Path().rglob("*")) == before


def test_what_is_missing_is_named(inside, capsys):
    assert ended("tune-cascade", *PAIR) == 2
    assert "setting 'cascade' is missing" in capsys.readouterr().err
    assert ended("tune-cascade", *PAIR[:4], "--cascade", "max-gram") == 2
    assert "'data.path' is missing" in capsys.readouterr().err
