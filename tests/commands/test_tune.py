"""`drafttrain tune` on tiny models: what it writes, and what it refuses in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from drafttrain.build.policy import read_policy
from drafttrain.cli import main
from drafttrain.decoding.types import Output
from drafttrain.evaluation.stops.costs import Costs, fit_costs
from drafttrain.evaluation.stops.report import TuneReport, read_tune_report
from drafttrain.evaluation.stops.tables import checked_lines, main_policies
from drafttrain.models.acceptance_head import AcceptanceHead, AcceptanceHeadConfig
from drafttrain.models.identity import hash_weights
from tests.tiny_models import tiny_model
from tests.tiny_targets import random_sentences, save_target

SAMPLING = {"temperature": 1.0, "top_k": 20, "top_p": 1.0}
SMALL = (
    "lengths=[2,5]",
    "h=[0.3,0.7]",
    "entropy=[1.0,2.0]",
    "cumulative=[0.3]",
    "max_draft=6",
    "replicates=2",
    "timing_prompts=2",
    "bootstrap=50",
    "batch_sizes=1,2",
    "finalists=1",
    "nodes=[4,8]",
    "levels=[2]",
    "delta=[0.2]",
)


def run(*arguments: str, capsys: pytest.CaptureFixture) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as leaving:
        main(list(arguments))
    shown = capsys.readouterr()
    return leaving.value.code or 0, shown.out, shown.err


@pytest.fixture(scope="module")
def heads_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two random heads for a drafter that often agrees with its target."""
    folder = tmp_path_factory.mktemp("tune")
    model = tiny_model("llama").float()
    save_target(model, folder / "target")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder / "drafter")
    for name, sentences in (("val", random_sentences(5)), ("test", random_sentences(10))):
        (folder / f"{name}.txt").write_text("\n".join(sentences) + "\n")
    recipe = {
        "run": str(folder / "run"),
        "target": {"path": str(folder / "target")},
        "drafter": str(folder / "drafter"),
        "data": {"path": str(folder / "val.txt"), "prefix": "w7 "},
        "held_out": {"path": str(folder / "val.txt"), "prefix": "w7 "},
        "distill": {"method": "sample", "sampling": SAMPLING | {"max_new_tokens": 16}},
    }
    for depth, weight in ((0, 1.0), (1, 6.0)):
        config = AcceptanceHeadConfig(
            hidden_size=16,
            depth=depth,
            rejection_weight=weight,
            drafter={"path": "drafter", "weights_sha256": hash_weights(model)},
            target={"path": "target"},
            sampling=SAMPLING,
        )
        head = AcceptanceHead(config)
        head.out.bias.data += 1.0
        head.save_pretrained(folder / "run" / "final" / config.name)
    (folder / "run" / "run.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "run"


def fit_known_times(outputs: list[Output], block: bool) -> Costs:
    """As if a pass took 2 ms and a call 11 ms: what a busy machine's clock says proves nothing."""
    for output in outputs:
        output.seconds = 0.01 + sum(0.002 * len(r.drafted) + 0.011 for r in output.rounds)
    return fit_costs(outputs, block)


@pytest.fixture(scope="module")
def tuned(heads_run: Path) -> TuneReport:
    test = heads_run.parent / "test.txt"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as leaving:
        patch.setattr("drafttrain.evaluation.stops.measuring.fit_costs", fit_known_times)
        main(["tune", "--heads", str(heads_run), "--report-data", str(test), *SMALL])
    assert not leaving.value.code
    return read_tune_report(heads_run / "tune.json")


def test_every_policy_is_replayed_on_both_sets_of_prompts(tuned: TuneReport):
    names = {"k=2", "k=5", "entropy(1)", "entropy(2)", "cumulative(0.3)", "oracle"}
    names |= {"logistic(0.3)", "logistic(0.7)"}
    names.add(f"bandit({round(tuned.costs.t_draft / tuned.costs.t_target, 3):g})")
    names |= {f"{head} head({h})" for head in ("D0-w1", "D1-w6") for h in (0.3, 0.7)}
    names |= {f"{name} block" for name in names - {"oracle"}}
    names |= {"opt-tree(4) gain(0.2,6)", "opt-tree(8) gain(0.2,6)", "rsd-s(2) k=2", "rsd-s(4) k=2"}
    assert tuned.reported_on is not None
    for replayed, prompts in ((tuned.chosen_on, 5), (tuned.reported_on, 10)):
        assert {policy.name for policy in replayed.policies} == names
        assert replayed.data.prompts == prompts
        chains = [policy for policy in replayed.policies if policy.kind != "tree"]
        assert len({policy.totals["tokens"] for policy in chains}) == 1
        assert replayed.find("oracle").totals["discarded"] == 0
        assert replayed.find(tuned.best_fixed).metrics["gain"].value == 0.0


def test_the_choice_is_made_on_the_choosing_prompts_alone(tuned: TuneReport):
    speeds = {
        policy.name: policy.metrics["tokens_per_second"].value
        for policy in tuned.chosen_on.policies
        if policy.kind != "oracle"
    }
    order = sorted(speeds, key=speeds.get, reverse=True)
    heads = [name for name in order if tuned.chosen_on.find(name).kind == "head"]

    def shallowest(first: str) -> str:
        alike = [name for name in heads if speeds[name] >= 0.99 * speeds[first]]
        return min(alike, key=lambda name: tuned.head(name.split()[0]).depth)

    assert tuned.best_head == shallowest(heads[0])
    assert tuned.best == (tuned.best_head if order[0] in heads else order[0])
    assert tuned.best_fixed == max((n for n in speeds if n.startswith("k=")), key=speeds.get)


def test_the_chosen_head_is_in_the_table(tuned: TuneReport):
    heads = [policy for policy in tuned.chosen_on.policies if policy.kind == "head"]
    slowest = min(heads, key=lambda policy: policy.metrics["tokens_per_second"].value).name
    assert len(heads) == 8
    for chosen in (tuned.best_head, slowest):
        shown = main_policies(tuned.model_copy(update={"best_head": chosen}))
        names = [policy.name for policy in shown if policy.kind == "head"]
        assert chosen in names and len(names) >= 3


def test_every_batch_size_has_costs_a_choice_and_a_policy(tuned: TuneReport, heads_run: Path):
    assert [one.batch_size for one in tuned.costs.rounds] == [1, 2]
    assert [one.batch_size for one in tuned.batches] == [1, 2]
    first, second = tuned.batches
    assert (first.best, first.best_fixed) == (tuned.best, tuned.best_fixed)
    assert first.tokens_per_second == tuned.chosen_on.find(tuned.best).metrics["tokens_per_second"]
    assert first.gain.value >= 0.0 and second.gain.value >= 0.0
    policy = read_policy(heads_run / "final" / "policy.json")
    chain = tuned.chosen_on.find(second.best_chain)
    assert chain.kind == policy.at(2).stop == policy.at(5).stop
    assert policy.at(1) == policy and set(policy.batches) == {2}


def test_the_best_are_decoded_beside_the_best_fixed_length(tuned: TuneReport):
    assert {one.batch_size for one in tuned.checked} == {1, 2}
    for choice in tuned.batches:
        names = {one.name for one in tuned.checked if one.batch_size == choice.batch_size}
        assert names == {choice.best, choice.best_fixed}
    for one in tuned.checked:
        assert one.decoded > 0.0 and one.plain_decoded > 0.0
        assert one.predicted > 0.0 and one.plain_predicted > 0.0
        predicted, decoded = one.predicted / one.plain_predicted, one.decoded / one.plain_decoded
        assert one.error == pytest.approx(predicted / decoded - 1.0)
    assert checked_lines(tuned)[-1].startswith("of the rounds decoded, predictions are off by ")


def test_the_rule_of_the_best_policy_is_in_its_file(tuned: TuneReport, heads_run: Path):
    facts = json.loads((heads_run / "final" / "policy.json").read_text())
    rule = tuned.chosen_on.find(tuned.best_chain).verifier
    assert facts["verifier"] == {"kind": "auto" if rule == "rejection" else rule}


def test_the_policy_lies_beside_the_heads_and_names_one(tuned: TuneReport, heads_run: Path):
    policy = read_policy(heads_run / "final" / "policy.json")
    assert policy.head in ("D0-w1", "D1-w6") and policy.h in (0.3, 0.7)
    assert policy.sampling == SAMPLING and policy.max_draft == 6
    facts = json.loads((heads_run / "final" / "policy.json").read_text())
    assert {"gain_over_best_fixed", "costs", "machine"} <= facts.keys()
    assert (heads_run / "tune.png").stat().st_size > 10_000


def test_the_page_holds_all_it_shows(tuned: TuneReport, heads_run: Path):
    page = (heads_run / "tune.html").read_text()
    assert re.findall(r'(?:src|href)="(?!#)[^"]*"', page) == [], "it points to something else"
    assert page.count("<figure><svg") == 5  # both sets of prompts, gains, reliability, costs
    assert "#000000" not in page and "prefers-color-scheme: dark" in page
    for choice in tuned.batches:
        assert f"batch {choice.batch_size}</span><b>{choice.best}</b>" in page
    assert f'<tr class="best"><td>{tuned.best}</td>' in page


def test_heads_are_judged_on_real_drafts(tuned: TuneReport):
    for head in tuned.head_facts:
        everywhere, before = head.all_positions, head.before_rejection
        assert {"binary_kl", "ece", "auc"} <= everywhere.keys()
        assert everywhere["binary_kl"].value >= 0.0 and 0.0 <= everywhere["ece"].value <= 1.0
        for positions in (everywhere, before):
            assert 0.0 <= positions["label_mean"].value <= 1.0 + 1e-12
        assert sum(head.reliability.positions) > 10


def test_a_drafter_without_heads_is_tuned_and_its_policy_is_found(
    heads_run: Path, capsys: pytest.CaptureFixture
):
    folder = heads_run.parent
    arguments = ("--target", str(folder / "target"), "--drafter", str(folder / "drafter"))
    arguments += ("--data", str(folder / "val.txt"), "sampling.max_new_tokens=12")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drafttrain.evaluation.stops.measuring.fit_costs", fit_known_times)
        report = ("--report", str(folder / "alone.json"))
        code, out, err = run("tune", *arguments, *report, *SMALL, capsys=capsys)
    assert code == 0, err
    found = read_tune_report(folder / "alone.json")
    assert found.heads is None and found.best_head is None and found.head_facts == []
    rules = {policy.kind: policy.verifier for policy in found.chosen_on.policies}
    assert set(rules.values()) == {"rejection", "target-walk"}  # one a kind in greedy decoding
    policy = read_policy(folder / "drafter" / "policy.json")
    assert policy.stop == found.chosen_on.find(found.best_chain).kind and policy.head is None
    (folder / "drafter" / "policy.json").unlink()


def test_a_dry_run_says_what_would_be_done(heads_run: Path, capsys):
    code, out, _ = run("tune", "--heads", str(heads_run), "--dry-run", *SMALL, capsys=capsys)
    assert code == 0
    assert "2: D0-w1, D1-w6" in out and "25, replayed" in out and "5 of" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["h=[0.5,1.0]"], "h = 1.0: a threshold on a probability lies between 0 and 1"),
        (["sampling.temperature=0.5"], "was trained for temperature = 1, but"),
        (["--drafter", "{target}"], "was trained for drafter 'drafter' with other weights"),
        (["--heads", "{nowhere}"], "holds no acceptance head"),
        (["lengths=[]"], "lengths is empty"),
        (["verifiers=[]"], "verifiers is empty"),
        (["lenghts=[2]"], "did you mean 'lengths'"),
    ],
)
def test_wrong_input_ends_in_one_line(heads_run: Path, arguments, message, capsys):
    places = {"target": heads_run.parent / "target", "nowhere": heads_run.parent / "nowhere"}
    arguments = [argument.format(**places) for argument in arguments]
    if "--heads" not in arguments:
        arguments += ["--heads", str(heads_run)]
    code, _, err = run("tune", *arguments, capsys=capsys)
    assert code == 2
    assert message in err and err.count("\n") == 1
