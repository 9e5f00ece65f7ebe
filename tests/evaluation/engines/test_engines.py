"""Other engines as baselines: their own process and phase, and what the report says of them."""

from __future__ import annotations

import io
import json

import pytest
from datasets import Dataset
from rich.console import Console

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import EvalConfig
from drafttrain.decoding.ctranslate2.transcribe import Transcription
from drafttrain.decoding.ctranslate2.translate import Placement, Translation, translate
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.evaluation.engines.measure import check_engines, decode_alone
from drafttrain.evaluation.engines.process import EngineProcess
from drafttrain.evaluation.engines.worker import Done, Task, Wish, fulfil
from drafttrain.evaluation.evaluate import evaluate
from drafttrain.evaluation.options import EvaluationOptions
from drafttrain.evaluation.plan import make_plan, plan_lines
from drafttrain.evaluation.prompts import read_prompts
from drafttrain.evaluation.report import Report, read_report, write_json
from drafttrain.evaluation.tables import main_table, parity_lines
from tests.evaluation.scripted import loaded
from tests.tiny_models import tiny_model
from tests.tiny_targets import random_sentences, save_target

pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed (it is in the dev extra)")

TEXTS = random_sentences(9)
ENGINES = ("ctranslate2", "ctranslate2-int8")
OPTIONS = EvaluationOptions(
    max_new_tokens=12, repeats=2, warmup=1, bootstrap=20, baselines=ENGINES, batch_sizes=(1, 4)
)


@pytest.fixture(scope="module")
def report() -> Report:
    """Two processes are started for it."""
    target = loaded(tiny_model("marian"))
    rows = Dataset.from_dict(
        {"row": range(len(TEXTS)), "source": TEXTS, "reference": [None] * len(TEXTS)}
    )
    return evaluate(target, CachedModel(target.model), [], rows, OPTIONS, "tiny.txt").report


def test_an_engine_is_a_baseline_measured_alone(report):
    assert [(run.name, run.kind, run.interleaved) for run in report.runs] == [
        ("plain", "plain", True),
        ("ctranslate2", "baseline", False),
        ("ctranslate2-int8", "baseline", False),
    ]
    exact, rounded = report.run("ctranslate2"), report.run("ctranslate2-int8")
    assert (exact.lossless, rounded.lossless) == (True, False)
    assert exact.metrics["identical"].value == 1.0
    assert exact.totals["tokens"] == report.run("plain").totals["tokens"]
    for run in (exact, rounded):
        assert run.metrics["speedup"].value > 0 and not run.lossy


def test_batches_of_an_engine_stand_beside_those_of_the_others(report):
    assert [batch.batch_size for batch in report.run("plain").batches] == [1, 4]
    for name in ENGINES:
        batches = report.run(name).batches
        assert [batch.batch_size for batch in batches] == [1, 4]
        assert all(batch.metrics["speedup"].value > 0 for batch in batches)
        assert all(batch.memory_bytes is not None for batch in batches)
    assert report.run("ctranslate2").batches[1].differing == 0


def test_the_table_and_the_lines_below_say_so(report, tmp_path):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(main_table(report))
    caption = " ".join(console.export_text().split())
    assert "Alone in a process each, not interleaved: ctranslate2, ctranslate2-int8." in caption
    assert f"ctranslate2: {len(TEXTS)} of {len(TEXTS)} equal to plain" in parity_lines(report)
    write_json(report, tmp_path / "report.json")
    assert read_report(tmp_path / "report.json") == report


class Echo:
    """A translator whose outputs are the sources."""

    def translate_batch(self, sources, **_):
        return [type("Result", (), {"hypotheses": [source]}) for source in sources]


def test_a_wish_is_decoded_in_batches_as_its_prompts_come():
    task = Task("", Placement(), Translation([0], [1], 9), [[5], [6, 7], [8], [9]])

    def decode(chosen):
        return translate(Echo(), [task.sources[prompt] for prompt in chosen], task.how)

    done = fulfil(decode, task, Wish([3, 1, 0], batch_size=2))
    assert done.tokens == [[9], [6, 7], [5]]
    assert done.seconds[0] == done.seconds[1] != done.seconds[2]
    assert done.peak_bytes is None
    assert fulfil(decode, task, Wish([2], 1, memory=True)).peak_bytes >= 0


def test_a_task_is_read_as_it_was_written(tmp_path):
    how = Translation([0, 7], [1, 2], 9, 1, {"beam_size": 1, "suppress_sequences": [["5"]]})
    task = Task("model", Placement("cpu", 0, "float32", 2), how, [[5], [6, 7]])
    heard = Task("model", Placement(), Transcription(1, 9), [[4, 5]], "features.safetensors")
    for one in (task, heard):
        one.write(tmp_path / "task.json")
        assert Task.read(tmp_path / "task.json") == one
    assert Done(**json.loads('{"tokens": [[1]], "seconds": [0.5]}')) == Done([[1]], [0.5])


def test_a_process_that_ends_is_an_error_with_its_last_words(tmp_path):
    task = Task(str(tmp_path / "nothing"), Placement(), Translation([0], [1], 9), [[5]])
    with pytest.raises(ValueError, match="of its own .*nothing.*; leave it out of baselines"):
        with EngineProcess(task, tmp_path):
            pass


def settings(target, **changes) -> EvalConfig:
    file = target.parent / "texts.txt"
    file.write_text("\n".join(TEXTS))
    values = {
        "target": {"path": str(target), "device": "cpu"},
        "data": {"path": str(file)},
        "decode": {"drafter": "none"},
        "baselines": ["ctranslate2"],
        "report": target.parent / "report.json",
    }
    return EvalConfig.model_validate(values | changes)


def test_the_plan_names_engines(tiny_target):
    plan = make_plan(settings(tiny_target), [settings(tiny_target).decode])
    assert "baseline  ctranslate2, alone in a process of its own" in plan_lines(plan)


def test_engines_that_cannot_decode_what_is_asked_for_are_refused_first(tiny_target, tmp_path):
    sampled = {"drafter": "none", "sampling": {"temperature": 0.7}}
    with pytest.raises(ConfigError, match="'ctranslate2', measured greedily, .* = 0.7 is sampling"):
        check_engines(settings(tiny_target, decode=sampled))
    llama = save_target(tiny_model("llama"), tmp_path / "llama")
    with pytest.raises(ConfigError, match="a 'llama' model cannot be converted"):
        check_engines(settings(llama))
    check_engines(settings(llama, baselines=["generate"]))


def test_what_the_target_asks_for_is_refused_before_anything_is_decoded():
    target = loaded(tiny_model("marian"))
    target.model.generation_config.repetition_penalty = 1.5
    model = CachedModel(target.model)
    rows = Dataset.from_dict({"row": [0], "source": ["w5 w6"], "reference": [None]})
    prompts, _ = read_prompts(target, model, rows)
    with pytest.raises(ValueError, match="RepetitionPenalty"):
        decode_alone(target, model, prompts, OPTIONS)
