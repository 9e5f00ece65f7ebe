"""`drafttrain bench`: servers that run already, servers that it starts, and what goes wrong."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from drafttrain.commands import bench as command
from drafttrain.commands.bench import bench
from drafttrain.config.base import ConfigError
from drafttrain.config.serving import BenchConfig
from drafttrain.evaluation.bench.report import BenchReport
from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.report import ServedRun, read_json, read_report, write_json
from tests.commanding import ended
from tests.evaluation.batches.reports import FORMER
from tests.evaluation.bench import fake_llama
from tests.evaluation.bench.fake_llama import FakeLlama, serving
from tests.tiny_models import tiny_model
from tests.tiny_targets import random_sentences, save_target


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A target, 18 prompts of which two are the same, and a llama-server with its files."""
    root = tmp_path_factory.mktemp("place")
    save_target(tiny_model("llama").float(), root / "target")
    texts = random_sentences(17)
    (root / "prompts.txt").write_text("\n".join([*texts, texts[3]]) + "\n")
    (root / "few.txt").write_text("\n".join(texts[:5]) + "\n")
    start = f"import runpy; runpy.run_path({fake_llama.__file__!r}, run_name='__main__')"
    program = root / "llama-server"
    program.write_text(f"#!{sys.executable} -S\n{start}\n")
    program.chmod(0o755)
    for name, content in (("target", b"GGUF"), ("drafter", b"GGUF"), ("wrong", b"GGUF of others")):
        (root / f"{name}.gguf").write_bytes(content)
    return root


def settings(place: Path, out: Path, **changes: object) -> BenchConfig:
    given = {
        "target": {"path": str(place / "target")},
        "data": {"path": str(place / "prompts.txt")},
        "concurrency": (1, 2),
        "warmup": 1,
        "bootstrap": 10,
        "out": out,
    }
    return BenchConfig(**given | changes)


def llama(place: Path, drafter: str = "drafter", **changes: object) -> dict[str, object]:
    files = {"model": place / "target.gguf", "draft_model": place / f"{drafter}.gguf"}
    return {"program": place / "llama-server"} | files | changes


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def started(place: Path, name: str) -> dict:
    return json.loads((place / f"{name}.json").read_text())


def test_two_servers_are_measured_side_by_side(capsys, tmp_path, place):
    out = tmp_path / "bench.json"
    with serving(FakeLlama(), FakeLlama(drafts=True)) as fakes:
        urls = ",".join(f"{fake.url}/v1" for fake in fakes)
        arguments = ("--target", place / "target", "--data", place / "prompts.txt", "--out", out)
        more = ("--concurrency", "1,2", "bootstrap=10", "warmup=1")
        assert ended("bench", "--server", urls, *arguments, *more) == 0
    for fake in fakes:
        assert len(fake.prompts) == len(set(fake.prompts)) == 17  # none twice
    report = read_json(BenchReport, out, "drafttrain bench")
    assert [level.concurrency for level in report.levels] == [1, 2]
    for level in report.levels:
        assert [side.side for side in level.sides] == ["without", "with"]
        assert level.compared == level.identical == 8
        assert level.sides[1].metrics["draft_acceptance_rate"].value == pytest.approx(4 / 6)
        assert level.sides[1].metrics["tokens_per_step"].value == pytest.approx(7 / 3)
        assert "speedup" in level.sides[1].metrics
    said = capsys.readouterr().out
    assert "with drafter" in said and "66.7" in said
    assert "concurrency 2: 8 of 8 outputs are the same tokens" in said


def test_llama_servers_are_started_on_loopback_and_ended(capsys, tmp_path, place):
    given = llama(place, n_max=4, p_min=0.5, arguments="-c 64", context=32)
    bench(settings(place, tmp_path / "bench.json", llama=given))
    asked = started(place, "with")["arguments"]
    shown = dict(zip(asked[::2], asked[1::2], strict=True))
    assert shown["--host"] == "127.0.0.1" and shown["-np"] == "2" and shown["-c"] == "64"
    assert shown["--spec-type"] == "draft-simple"
    assert (shown["--spec-draft-n-max"], shown["--spec-draft-p-min"]) == ("4", "0.5")
    assert "-md" not in started(place, "without")["arguments"]
    assert not any(is_alive(started(place, name)["pid"]) for name in ("with", "without"))
    options = json.loads((tmp_path / "bench.json").read_text())["options"]
    assert options["models"] == ["target.gguf", "drafter.gguf"]
    assert str(place) not in json.dumps(options)


def test_an_interruption_ends_what_was_started(tmp_path, place, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure_level", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench(settings(place, tmp_path / "bench.json", llama=llama(place)))
    assert not any(is_alive(started(place, name)["pid"]) for name in ("with", "without"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"drafter": "wrong"}, "with the drafter ended at its start: E common: the target and"),
        ({"arguments": "--slow 1", "start_seconds": 1.0}, "not ready within .* = 1; give it more"),
        ({"drafter": "none"}, "llama.draft_model = .*no such file"),
        ({"program": "{place}/none"}, "llama.program = .*no such file"),
        ({"program": "{place}/target.gguf"}, "is no program that can be run"),
        ({"model": None}, "llama.model is missing"),
    ],
)
def test_what_cannot_be_started_is_said_in_one_line(tmp_path, place, changes, says):
    given = {k: v.format(place=place) if isinstance(v, str) else v for k, v in changes.items()}
    start = time.monotonic()
    with pytest.raises(ConfigError, match=says) as refused:
        bench(settings(place, tmp_path / "bench.json", llama=llama(place, **given)))
    assert len(str(refused.value).splitlines()) == 1 and not (tmp_path / "bench.json").exists()
    assert time.monotonic() - start < 50
    if "start" in says:
        assert not is_alive(started(place, "without")["pid"])


def test_what_was_measured_before_a_failure_is_kept(tmp_path, place):
    """The second concurrency fails: the first one's figures are in the report."""
    fake = FakeLlama(drafts=True)
    fake.trouble = lambda number: 500 if number == 12 else None
    with serving(FakeLlama(), fake) as fakes:
        server = {"urls": [one.url for one in fakes]}
        with pytest.raises(OSError, match="500: 'out of memory'; what was measured is in .*json"):
            bench(settings(place, tmp_path / "bench.json", server=server))
    report = read_json(BenchReport, tmp_path / "bench.json", "drafttrain bench")
    assert [level.concurrency for level in report.levels] == [1]


def served(k: int) -> ServedRun:
    metrics = {name: Estimate(0.4321, 0.4, 0.5) for name in ("draft_acceptance_rate",)}
    return ServedRun(
        drafter="d", rule="greedy", k=k, metrics=metrics, per_position_acceptance_rates=[]
    )


def test_a_prediction_stands_beside_what_was_measured(capsys, tmp_path, place):
    report = read_report(FORMER).model_copy(update={"served": [served(3), served(5)]})
    write_json(report, tmp_path / "eval.json")
    given = {"report": tmp_path / "eval.json", "llama": {"n_max": 4}}
    with serving(FakeLlama(drafts=True)) as [fake]:
        given["server"] = {"urls": [fake.url]}
        with pytest.raises(ConfigError, match=r"--n-max 4 .*it has k=3 p-min=0, k=5 p-min=0"):
            bench(settings(place, tmp_path / "bench.json", **given))
        given["llama"] = {"n_max": 5}
        bench(settings(place, tmp_path / "bench.json", **given))
    said = capsys.readouterr().out
    assert "predicted" in said and "43.2" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "nothing to measure"),
        (("--server", "http://user:secret@host/v1"), "perhaps a secret"),
        (("--server", "http://127.0.0.1:9"), "the connection failed"),
        (("--server", "http://a,http://a"), "twice"),
        (("--server", "http://a", "--llama-server", "x"), "both given"),
        (("--server", "http://a", "--data", "{place}/few.txt"), "1 are left for concurrency 2"),
        (("--server", "http://a", "--out", "bench.txt"), "no file name ending in .json"),
        (("--server", "http://a", "--report", "none.json"), "no such file"),
    ],
)
def test_wrong_input_is_one_line(capsys, tmp_path, monkeypatch, place, arguments, says):
    monkeypatch.chdir(tmp_path)
    given = {"--target": place / "target", "--data": place / "prompts.txt"}
    words = [word for option in given.items() for word in option if option[0] not in arguments]
    words += ["--target", place / "target"] if "--target" not in map(str, words) else []
    assert ended("bench", *words, *(one.format(place=place) for one in arguments)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in lines if line.startswith("drafttrain:")]) == 1
    assert says in lines[-1] and "secret@" not in lines[-1]
    assert not [*tmp_path.iterdir()]
