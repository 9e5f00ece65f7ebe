"""`drafttrain tune` over trees and cascades: what is chosen, written, and decoded with."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from drafttrain.build.policy import read_policy
from drafttrain.evaluation.report import read_report
from drafttrain.evaluation.stops.report import TuneReport, read_tune_report
from tests.commanding import ended
from tests.commands.test_tune import fit_known_times
from tests.export.pairs import noisy_copy
from tests.refusals import recorded
from tests.tiny_models import tiny_model
from tests.tiny_targets import random_sentences, save_target

PAIR = ["--target", "llama", "--drafter", "base", "--data", "dev.txt"]
SMALL = ["lengths=[2,4]", "h=[0.5]", "entropy=[1.0]", "cumulative=[0.3]", "max_draft=6"]
SMALL += ["nodes=[4,8]", "delta=[0.2]", "timing_prompts=2", "bootstrap=20", "finalists=1"]
SEARCH = ["--cascade", "small,max-gram", "--leniency", "1,2", "cascades=7", "first_prompts=2"]
SHORT = ["--max-new-tokens", "16"]
EVAL = ["baselines=[]", "repeats=1", "warmup=0", "bootstrap=20"]
EVAL += ["decode.sampling.max_new_tokens=16", "--report", "measured.json"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tune-methods")
    save_target(tiny_model("llama").float(), root / "llama")
    save_target(noisy_copy("llama", 0.05).float(), root / "base")
    save_target(noisy_copy("llama", 0.3).float(), root / "small")
    for name, texts in (("dev", random_sentences(7)[2:]), ("test", random_sentences(12)[9:])):
        (root / f"{name}.txt").write_text("".join(f"{text}\n" for text in texts))
    return root


def tuned(*arguments: str) -> TuneReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drafttrain.evaluation.stops.measuring.fit_costs", fit_known_times)
        asked = [*PAIR, *SMALL, *SHORT, "--report", "tune.json", *arguments]
        assert ended("tune", *asked) == 0
    return read_tune_report(Path("tune.json"))


@pytest.fixture(scope="module")
def searched(project: Path) -> TuneReport:
    with contextlib.chdir(project):
        return tuned(*SEARCH, "--report-data", "test.txt", "policy=searched.json")


def test_trees_and_cascades_are_halved_and_the_best_reported_on_both_sets(searched: TuneReport):
    assert [(one.prompts, one.candidates) for one in searched.rungs[:2]] == [(2, 9), (4, 5)]
    assert set(searched.dropped.values()) <= {2, 4}
    for replayed in (searched.chosen_on, searched.reported_on):
        kinds = [one.kind for one in replayed.policies]
        assert kinds.count("tree") + kinds.count("cascade") == 4  # as many as stay to the end
        greedy = {one.totals["tokens"] for one in replayed.policies}
        assert len(greedy) == 1, "greedy outputs are the target's, whatever drafts"


def test_costs_are_measured_for_every_way_and_every_drafter(searched: TuneReport):
    costs = {one.way: one for one in searched.costs.methods}
    assert set(costs) == {"opt-tree", "cascade"}
    own = {"rounds", "passes", "levels", "tokens", "history"}
    assert costs["opt-tree"].drafting.keys() == own
    assert costs["cascade"].drafting.keys() == own | {"base", "small", "max-gram"}
    assert all(seconds >= 0.0 for one in costs.values() for seconds in one.drafting.values())


def test_what_was_played_is_what_eval_measures(searched: TuneReport, inside: Path):
    """The best cascade or tree, decoded from a policy that names it."""
    played = [one for one in searched.chosen_on.policies if one.kind == "tree"]
    assert ended("tune", *PAIR, *SMALL, *SHORT, "--dry-run") == 0
    for one in played:
        nodes = int(one.value)
        method = {"tree": {"kind": "opt-tree", "nodes": nodes}}
        method["stop"] = {"kind": "gain", "delta": 0.2, "max_draft": 6}
        Path("by-hand.json").write_text(json.dumps({"stop": "fixed", "k": 2, "method": method}))
        assert ended("eval", *PAIR, *EVAL, "--policy", "by-hand.json") == 0
        _, measured = read_report(Path("measured.json")).runs
        assert measured.method == "opt-tree" and measured.sizes["nodes"] == nodes
        for name in ("tokens", "rounds", "drafted", "accepted", "passes"):
            assert measured.totals[name] == one.totals[name], name
        assert measured.metrics["identical"].value == 1.0


@pytest.mark.parametrize("method", ["tree", "cascade"])
def test_generate_decodes_with_what_the_policy_names(
    inside: Path, method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """As if chains, and the other method, were very slow."""
    from drafttrain.evaluation.stops.prices import Prices

    priced = Prices.seconds

    def seconds(self, counts, place, candidate, batch_size=1):
        return priced(self, counts, place, candidate, batch_size) + 100.0 * (
            candidate.kind != method
        )

    monkeypatch.setattr(Prices, "seconds", seconds)
    report = tuned("--cascade", "max-gram", "cascades=3", "local=false", "policy=base/policy.json")
    policy = read_policy(Path("base/policy.json"))
    assert report.chosen_on.find(report.best).kind == method
    assert policy.stop == report.chosen_on.find(report.best_chain).kind
    assert (policy.method.tree is None) == (method == "cascade")
    assert "programs that draft chains alone" in capsys.readouterr().out
    asked = [*PAIR, "--limit", "2", "--json", "decode.sampling.max_new_tokens=16"]
    assert ended("generate", *asked) == 0
    with_method = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ended("generate", *asked, "--k", "2") == 0
    chains = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["tokens"] for one in with_method] == [one["tokens"] for one in chains]
    assert ended("eval", *PAIR, *EVAL) == 0
    _, measured = read_report(Path("measured.json")).runs
    assert measured.method == ("opt-tree" if method == "tree" else "cascade")
    found = report.chosen_on.find(report.best)
    assert measured.totals["rounds"] == found.totals["rounds"]
    Path("base/policy.json").unlink()


def test_a_dry_run_counts_what_would_be_played(inside: Path, capsys: pytest.CaptureFixture):
    with recorded() as loaded:
        assert ended("tune", *PAIR, *SMALL, *SEARCH, "--dry-run") == 0
    assert "9 trees and cascades, on 2 prompts first" in capsys.readouterr().out
    assert not loaded


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--leniency", "0.5"], ("leniency.0 = '0.5'", "or equal to 1")),
        (["--cascade", "max-gram"], ("leniency = 2.0", "reviews another model's tokens")),
        (["--cascade", "max-gram,small"], ("'max-gram' is the smallest there is",)),
        (["--cascade", "base,max-gram"], ("'base' is twice", "once")),
        (["cascades=1"], ("cascades = 1", "greater than or equal to 2")),
        (["bigrams=table.safetensors", "--cascade", "small"], ("bigrams", "leave it out")),
        (["trees=none"], ("trees = 'none'", "[]")),
        (["trees=sequoia"], ("trees = 'sequoia'", "opt-tree")),
        (["nodes=[]"], ("nodes is empty",)),
        (["delta=[1.5]"], ("delta", "1.5")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_ends_in_one_line_before_weights_load(inside, capsys, arguments, says):
    before = sorted(Path().rglob("*"))
    with recorded() as loaded:
        assert ended("tune", *PAIR, *SMALL, *SEARCH, *arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    for words in says:
        assert words in line
    assert not loaded
    assert sorted(Path().rglob("*")) == before
