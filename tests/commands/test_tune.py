"""`drafttrain tune` on tiny models: its candidates, its files, and decoding with its policy."""

import json
import re
from pathlib import Path

import pytest
import yaml

from drafttrain.commands.export import read_measured
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.policy import read_policy
from drafttrain.evaluation import evaluate, tune
from drafttrain.evaluation.report import Report, read_report
from drafttrain.models.identity import hash_target
from tests.commanding import ended
from tests.export.pairs import noisy_copy, save_head, save_spec_drafter
from tests.refusals import recorded
from tests.tiny_drafters import block_heads
from tests.tiny_models import tiny_model
from tests.tiny_targets import random_sentences, save_target

SAMPLING = {"temperature": 1.0, "top_k": 20, "top_p": 1.0, "min_p": 0.0}
TRIED = {"k": [2, 5], "entropy": [1.0], "cumulative": [0.3], "nodes": [4]}
NO_OTHERS = {"entropy": [], "cumulative": [], "confidence": []}


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """Starts with two prompts; draws no plot and measures no memory, which collects all garbage."""
    monkeypatch.setattr(tune, "FIRST", 2)
    monkeypatch.setattr(evaluate, "peak_growth", lambda work, device: 0)
    monkeypatch.setattr(evaluate, "plot_report", lambda report: b"")


def small(*names: str, **more: list[float]) -> list[str]:
    """Returns arguments for few candidates (all kinds if no names are given) and short outputs."""
    sweep = {name: TRIED[name] for name in names or TRIED} | more
    return [f"sweep={json.dumps(sweep)}", "sampling.max_new_tokens=8"]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A pair, a run with two random heads for it, and prompts."""
    root = tmp_path_factory.mktemp("tune")
    save_target(tiny_model("llama").float(), root / "target")
    drafter = noisy_copy("llama", 0.1).float()
    save_target(drafter, root / "drafter")
    for name, count in (("val", 9), ("test", 12)):
        sentences = random_sentences(count)
        (root / f"{name}.txt").write_text("".join(f"{one}\n" for one in sentences))
    data = {"path": str(root / "val.txt"), "prefix": "w7 "}
    recipe = {
        "run": str(root / "run"),
        "target": {"path": str(root / "target")},
        "drafter": str(root / "drafter"),
        "data": data,
        "held_out": data,
        "distill": {"method": "sample", "sampling": SAMPLING | {"max_new_tokens": 8}},
    }
    for depth in (0, 1):
        folder = root / "run" / "final" / f"D{depth}-w1"
        save_head(folder, drafter, depth=depth, rejection_weight=1.0, sampling=SAMPLING)
    (root / "run" / "run.yaml").write_text(yaml.safe_dump(recipe))
    return root


@pytest.fixture(scope="module")
def tuned(project) -> Report:
    given = ["--heads", project / "run", "--report-data", project / "test.txt", *small(h=[0.5])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "FIRST", 2)
        patch.setattr(evaluate, "peak_growth", lambda work, device: 0)
        assert ended("tune", *given, "--batch-size", "1,2", "--write") == 0
    return read_report(project / "run" / "tune.json")


def test_the_candidates_are_decoded_and_halved_at_every_batch_size(tuned):
    search = tuned.search
    names = {"k=2", "k=5", "k=2 block", "k=5 block", "entropy(1) block", "cumulative(0.3) block"}
    names |= {"opt-tree(4)", "rsd-s(2x4)"}
    hs = {0.5, *([] if search.threshold is None else [round(search.threshold, 3)])}
    names |= {f"{head} h={h:g} block" for head in ("D0-w1", "D1-w1") for h in hs}
    assert set(search.candidates) == names
    for size in (1, 2):
        first, *later = [rung for rung in search.rungs if rung.batch_size == size]
        assert set(first.candidates) == {"plain", *names} and first.prompts == {1: 2, 2: 8}[size]
        left = [len(rung.candidates) for rung in (first, *later)]
        assert left == sorted(left, reverse=True) and left[-1] <= 3
        for rung in (first, *later):
            for one in rung.candidates.values():
                assert one.tokens_per_second.value > 0.0 and one.verification_rate <= 1.0


def test_the_final_figures_are_of_other_prompts_with_the_choices(tuned, project):
    assert tuned.runs[0].name == "plain"
    assert tuned.data.path == str(project / "test.txt")
    assert tuned.search.data.path == str(project / "val.txt")
    for choice in tuned.search.choices:
        for name in (choice.best, choice.best_fixed, choice.best_head):
            assert all(tuned.run(name, size).lossless for size in (1, 2))


def test_the_policy_names_the_choice_and_the_best_head(tuned, project):
    policy = read_policy(project / "run" / "final" / "policy.json")
    first, second = tuned.search.choices
    assert set(policy.batches) == {2} and policy.sampling == SAMPLING
    assert policy.head in ("D0-w1", "D1-w1") and policy.h is not None
    for own, choice in ((policy, first), (policy.batches[2], second)):
        settings = tuned.search.candidates[choice.best_chain]
        stop = {name: value for name, value in settings["stop"].items() if name != "head"}
        assert own.stop_config().model_dump(exclude_unset=True) == {"kind": "fixed"} | stop
        assert own.verifier.kind == settings.get("verifier", {}).get("kind", "auto")
        assert own.speculate == (choice.best != "plain")
    facts = json.loads((project / "run" / "final" / "policy.json").read_text())
    assert {"machine", "measured_on", "speedup"} <= facts.keys()


def test_the_page_stands_alone_and_shows_every_candidate(tuned, project):
    page = (project / "run" / "tune.html").read_text()
    assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', page) == []
    for name in ("plain", *tuned.search.candidates):
        assert f"<td>{name}</td>" in page
    assert (project / "run" / "tune.png").stat().st_size > 10_000


def test_a_report_of_tune_is_read_as_one_of_eval(tuned, project):
    file, target = project / "run" / "tune.json", TargetConfig(path=str(project / "target"))
    measured = read_measured(file, target)
    assert f"| {tuned.search.choices[0].best_fixed} |" in measured.table
    assert any("of 12 other prompts" in note for note in measured.notes)
    part = tuned.model_copy(update={"partial": "3 of 12 inputs"}).model_dump_json()
    (project / "part.json").write_text(part)
    assert "INTERRUPTED: 3 of 12 inputs" in read_measured(project / "part.json", target).notes[0]
    other = read_measured(file, TargetConfig(path="other"))
    assert other.notes[0] == "measured with target 'target', not 'other'"


def test_inputs_that_are_too_long_count_neither_as_full_batches_nor_as_final_ones(
    project, tmp_path, capsys
):
    long, fits = f"{'w5 ' * 70}\n", [f"w{n}\n" for n in (5, 6, 7, 8)]
    (tmp_path / "long.txt").write_text(long * 6 + "".join(fits[:2]))
    (tmp_path / "fits.txt").write_text("".join(fits))
    pair = ["--target", project / "target", "--drafter", project / "drafter"]
    given = [*small("k", **NO_OTHERS), "trees=[]", "--report", tmp_path / "t.json"]
    long, fits = tmp_path / "long.txt", tmp_path / "fits.txt"
    data = ["--data", long, "--report-data", fits, "--batch-size", "4"]
    assert ended("tune", *pair, *data, *given) == 2
    assert "batch_sizes = 4, but there are 2 inputs" in capsys.readouterr().err
    assert ended("tune", *pair, "--data", fits, "--report-data", long, *given) == 0
    report = read_report(tmp_path / "t.json")
    assert report.data.prompts == 2 and len(report.data.skipped) == 6


@pytest.mark.parametrize("fastest", ["plain", "opt-tree(4)", "deep", "k=5"])
def test_generate_uses_the_fastest_method(project, fastest, monkeypatch, capsys):
    """A drafter without heads, greedy decoding; all other candidates are made very slow."""
    own = tune.decode_all

    def decode_all(*given):
        found = own(*given)
        for name, facts in found.items():
            facts[1] *= 1.0 if name == fastest else 100.0
        return found

    monkeypatch.setattr(tune, "decode_all", decode_all)
    pair = ["--target", project / "target", "--drafter", project / "drafter"]
    data = ["--data", project / "val.txt"]
    given = [*small("k", "nodes", **NO_OTHERS), "candidates.deep.cascade.drafters=max-gram"]
    given += ["--report", project / "t.json"]
    assert ended("tune", *pair, *data, *given, *(["--write"] if fastest != "k=5" else [])) == 0
    if fastest == "k=5":  # without --write later commands are unchanged
        assert not (project / "drafter" / "policy.json").exists()
        (project / "t.policy.json").rename(project / "drafter" / "policy.json")
    report = read_report(project / "t.json")
    assert report.search.choices[0].best == fastest and report.search.heads == []
    assert report.search.oracle.target_calls <= report.search.oracle.tokens
    assert report.search.data.prompts == 6 and report.data.prompts == 3  # a third is split off
    assert {run.metrics["identical"].value for run in report.runs[1:]} == {1.0}
    policy = read_policy(project / "drafter" / "policy.json")
    assert policy.speculate == (fastest != "plain")
    capsys.readouterr()
    arguments = [*pair, *data, "--limit", "1", "--json"]
    assert ended("generate", *arguments, "decode.sampling.max_new_tokens=8") == 0
    shown = capsys.readouterr()
    assert ("plain decoding is faster" in shown.err) == (fastest == "plain")
    line = json.loads(shown.out.splitlines()[0])
    assert ended("generate", *arguments, "decode.sampling.max_new_tokens=8", "--k", "3") == 0
    assert line["tokens"] == json.loads(capsys.readouterr().out.splitlines()[0])["tokens"]
    (project / "drafter" / "policy.json").unlink()


@pytest.mark.parametrize("kind", ["max-gram", "spec-drafter", "block-heads"])
def test_other_kinds_of_drafters_are_tuned(project, kind, tmp_path):
    """Language models, parallel and state drafters are tested above and with their recipes."""
    target, drafter = tmp_path / "target", kind
    model = tiny_model("marian")
    save_target(model.float() if kind == "max-gram" else model, target)
    if kind == "spec-drafter":
        drafter = save_spec_drafter(tmp_path / kind, model, target)
    if kind == "block-heads":
        heads, drafter = block_heads(is_encoder_decoder=True), tmp_path / kind
        heads.config.target = {"path": str(target), "weights_sha256": hash_target(model)}
        heads.save_pretrained(drafter)
    read = small("entropy", "cumulative", *(["nodes"] if kind == "spec-drafter" else []))
    given = ["--target", target, "--drafter", drafter, "--data", project / "val.txt"]
    given += read[-1:] if kind == "max-gram" else read
    report = tmp_path / "tune.json"
    assert ended("tune", *given, "--report", report) == 0
    search = read_report(report).search
    stops = {own["stop"].get("kind", "fixed") for own in search.candidates.values()}
    rows = set() if kind == "max-gram" else {"entropy", "confidence", "cumulative"}
    assert stops == {"fixed", *rows, *({"gain"} if kind == "spec-drafter" else ())}
    assert (search.oracle is None) == (kind == "block-heads")  # they support no teacher forcing
    best = search.candidates[search.choices[0].best_chain]
    assert read_policy(tmp_path / "tune.policy.json").stop == best["stop"].get("kind", "fixed")


def test_a_dry_run_loads_no_model_and_lists_the_candidates(project, capsys):
    with recorded() as loaded:
        assert ended("tune", "--heads", project / "run", "--dry-run", *small(h=[0.5])) == 0
    printed = capsys.readouterr().out
    assert "11: plain, k=2, k=5," in printed and "D1-w1 h=0.5 block" in printed
    assert "6 of" in printed and "3 of" in printed and not loaded
