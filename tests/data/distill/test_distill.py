"""Distilled outputs are the target's, and shards do not depend on interruptions or processes."""

import gzip
import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import DistillConfig
from drafttrain.data.distill import distill as distilling
from drafttrain.data.distill.batches import batches_by_length
from drafttrain.data.distill.distill import Distilling, ShardRow, distill
from drafttrain.data.distill.generation import generate_settings, trim
from drafttrain.data.distill.plan import plan_distillation
from drafttrain.data.shards.outputs import Manifest, load_distilled
from drafttrain.models.identity import hash_tokenizer, hash_weights
from drafttrain.models.loading import load_target
from tests.commanding import ended
from tests.data.distill.tiny_distill import SAMPLED, changed, rows_of, settings, shards
from tests.processes.launching import Launch, run
from tests.tiny_models import BOS, EOS, tiny_model, tiny_seq2seq
from tests.tiny_speech import save_whisper
from tests.tiny_targets import random_sentences, save_target, tiny_tokenizer


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_outputs_are_those_of_generate_row_by_row(tiny_target, method):
    config = settings(tiny_target, sentences=9, method=method, num_beams=3, batch_tokens=40)
    manifest = distill(config)
    assert manifest.counts.ok == manifest.rows == 9
    target = load_target(config.target)
    beams = 3 if method == "beam" else 1
    lines = Path(config.data.path).read_text().splitlines()
    for row in load_distilled(config.out):
        source = torch.tensor([row["source_ids"]])
        wanted = {"do_sample": False, "num_beams": beams, "max_new_tokens": 12}
        expected = target.model.generate(source, **wanted)[0, 1:].tolist()
        assert row["target_ids"] == expected  # a single row is not padded
        assert row["source_ids"] == target.tokenizer(lines[row["row"]])["input_ids"]


def test_padding_is_cut_by_place_and_not_by_value():
    model = tiny_model("bart", pad_token_id=EOS)  # EOS is also the decoder start token
    sequences = torch.tensor([[1, 5, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1], [1, 5, 0, 0, 6, 0]])
    assert trim(sequences, model) == [[5, 0, 1], [1], [5, 0, 0, 6, 0]]


def test_two_processes_write_the_rows_of_one(tiny_target, tmp_path):
    """Two processes, as torchrun starts them, on CPU (gloo)."""
    one, two = settings(tiny_target, "one", **SAMPLED), settings(tiny_target, "two", **SAMPLED)
    file = tmp_path / "distill.yaml"
    file.write_text(json.dumps(two.model_dump(mode="json")))
    run(Launch("drafttrain", ["distill", "--config", str(file)], tmp_path / "log", processes=2))
    distill(one)
    assert shards(two.out) == shards(one.out)
    assert Manifest.read(two.out).counts == Manifest.read(one.out).counts


def test_every_input_row_is_accounted_for(tiny_target, capsys):
    config = settings(tiny_target, sentences=12, max_source_tokens=6)
    lines = random_sentences(12, longest=5)
    lines[3], lines[7], lines[9] = "", "w5 w6 w7 w8 w9 w10", "   "
    Path(config.data.path).write_text("\n".join(lines) + "\n")
    manifest = distill(changed(config, data={"skip": 1, "prefix": "w4 "}))
    counts = manifest.counts
    assert (manifest.rows, counts.ok, counts.skipped, counts.error) == (11, 7, 4, 0)
    rows = {row["row"]: row for row in rows_of(config.out)}
    assert sorted(rows) == list(range(1, 12))
    assert {number for number, row in rows.items() if row["status"] == "skipped"} == {3, 4, 7, 9}
    assert rows[3]["reason"] == rows[9]["reason"] == "empty"
    assert rows[7]["reason"] == "8 tokens where max_source_tokens is 6"
    printed = capsys.readouterr().err
    assert "row 7: skipped, 8 tokens where" in printed and "row 3: skipped, empty" in printed
    assert re.search(r"11 rows in \d+ s, [\d.]+ a second", printed)
    kept = load_distilled(config.out)
    assert kept.column_names == ["row", "source_ids", "target_ids"]
    assert list(kept["row"]) == [1, 2, 5, 6, 8, 10, 11]
    assert counts.source_tokens == sum(map(len, kept["source_ids"]))
    assert counts.target_tokens == sum(map(len, kept["target_ids"]))
    cut = [ids for ids in kept["target_ids"] if ids[-1] != EOS]
    assert counts.truncated == len(cut) and all(len(ids) == 12 for ids in cut)


def test_inputs_and_weights_are_compared_by_content_and_not_by_place(tiny_target, tmp_path):
    config = settings(tiny_target, sentences=4)
    distill(config)
    before = shards(config.out)
    texts = tmp_path / "other.txt"
    texts.write_text("\n".join(random_sentences(4)[::-1]) + "\n")
    target = save_target(tiny_model("marian", seed=1), tmp_path / "other")
    for changes, message in (
        ({"data": {"limit": 2}}, "data.limit = None, .*2"),
        ({"data": {"path": str(texts)}}, "inputs_sha256 .*another content"),
        ({"target": {"path": str(target)}}, "weights_sha256 .*another content"),
    ):
        with pytest.raises(ConfigError, match=message):
            distill(changed(config, **changes))
    assert shards(config.out) == before
    (config.out / "shard-00000.parquet").unlink()
    places = {"target": {"path": str(tiny_target.rename(tmp_path / "moved"))}}
    places["data"] = {"path": str(Path(config.data.path).rename(tmp_path / "moved.txt"))}
    distill(changed(config, **places))
    assert shards(config.out) == before


def test_two_runs_do_not_write_to_one_folder(tiny_target):
    config = settings(tiny_target, sentences=4)
    config.out.mkdir()
    with FileLock(config.out / ".writing.lock"), pytest.raises(ConfigError, match="another proc"):
        distill(config)
    distill(config)  # the lock ended with its holder
    with FileLock(config.out / ".writing.lock"):
        distill(config)  # nothing is left to write


def test_damaged_or_strange_folders_are_refused(tiny_target, tmp_path):
    with pytest.raises(ConfigError, match="holds no manifest.json"):
        load_distilled(tmp_path)
    config = settings(tiny_target, sentences=10)
    distill(config)
    first, second = (config.out / f"shard-0000{i}.parquet" for i in (0, 1))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(ConfigError, match="has 2 rows where 8 belong; delete it"):
        load_distilled(config.out)
    first.write_bytes(content[:100])
    with pytest.raises(ConfigError, match="cannot be read .*delete it"):
        load_distilled(config.out)
    (config.out / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="no manifest.json"):
        distill(config)


def test_batches_hold_as_many_rows_of_like_length_as_fit():
    rows = [ShardRow(i, source_ids=[4] * length) for i, length in enumerate([3, 9, 1, 3, 2, 30])]
    batches = [[row.row for row in batch] for batch in batches_by_length(rows, 9)]
    assert batches == [[5], [1], [0, 3, 4], [2]]


def test_fingerprints_follow_contents(tmp_path):
    weights = [hash_weights(tiny_model("marian", seed=seed)) for seed in (0, 0, 1)]
    assert weights[0] == weights[1] != weights[2]
    tokenizer = tiny_tokenizer()
    before = hash_tokenizer(tokenizer)
    tokenizer(["w4", "w5 w6"], padding=True, truncation=True, max_length=3)
    assert hash_tokenizer(tokenizer) == before
    tokenizer.add_tokens(["new"])
    assert hash_tokenizer(tokenizer) != before


def test_settings_of_generate_state_all_that_a_target_could_set_otherwise(tiny_target):
    """A target that samples by default is decoded greedily if the method is greedy."""
    config = settings(tiny_target)
    plain = distill(config, target := load_target(config.target))
    wanted = {"do_sample": True, "num_beams": 4, "temperature": 2.0, "top_k": 3, "max_length": 5}
    target.model.generation_config.update(**wanted, early_stopping=True, length_penalty=2.0)
    other = changed(config, out=tiny_target.parent / "other")
    assert distill(other, target).counts == plain.counts
    assert rows_of(other.out) == rows_of(config.out)
    assert generate_settings(config)["num_beams"] == 1


def test_the_embedded_data_are_whole_and_their_splits_disjoint():
    folder = Path(__file__).resolve().parents[3] / "data"
    spec = importlib.util.spec_from_file_location("make", folder / "make_docstrings.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    sizes, seen = {}, set()
    for name in ("train", "val", "test"):
        with gzip.open(folder / "docstrings" / f"{name}.jsonl.gz", "rt") as file:
            rows = [json.loads(line) for line in file]
        sizes[name] = len(rows)
        for row in rows:
            assert row["source"] not in seen
            assert row["source"] == make.strip_casing_and_punctuation(row["reference"])
            seen.add(row["source"])
    assert sizes == {"train": 11162, "val": 500, "test": 500}


def test_a_distillation_grows_when_its_limit_is_raised(tiny_target):
    """Full shards are kept; the result is that of a run with the larger limit."""
    config = settings(tiny_target, sentences=11, shard_rows=4)
    few, whole = changed(config, data={"limit": 6}), config.out.with_name("whole")
    distill(few)
    before = (config.out / "shard-00000.parquet").stat().st_mtime_ns
    assert [distill(changed(config, data={"limit": 8})).rows, distill(config).rows] == [8, 11]
    assert distill(changed(config, out=whole)).counts == Manifest.read(config.out).counts
    assert shards(config.out) == shards(whole)
    assert (config.out / "shard-00000.parquet").stat().st_mtime_ns == before
    for other in (few, changed(config, shard_rows=5)):
        with pytest.raises(ConfigError, match="was begun with"):
            distill(other)
    assert Manifest.read(config.out).counts.ok == 11


def test_many_rows_use_the_faster_backend_and_keep_it(tiny_target, monkeypatch, capsys):
    plain = settings(tiny_target, "transformers", sentences=10)
    given = plain.model_dump(exclude={"batch_tokens"}, exclude_unset=True)
    config = DistillConfig.model_validate(given | {"out": tiny_target.parent / "out"})
    distill(changed(plain, backend="transformers"))
    monkeypatch.setattr(distilling, "TRIED_SHARE", 1)
    measured = Distilling.rows_per_second

    def measure(faster: str) -> None:
        def rate(tried: Distilling, work) -> float:
            assert measured(tried, work) > 0.0
            return 2.0 if tried.decoder.backend == faster else 1.0

        monkeypatch.setattr(Distilling, "rows_per_second", rate)

    measure("engine")
    assert distill(config).backend == "engine"
    said = capsys.readouterr().err
    assert "engine 2.0; all are decoded by engine" in said
    assert "compare backends: 100% 36/36" in said
    assert rows_of(config.out) == rows_of(plain.out)
    (config.out / "shard-00001.parquet").unlink()
    measure("transformers")
    assert distill(config).backend == "engine"  # keeps the backend of the first run
    other = changed(config, out=tiny_target.parent / "other")
    assert distill(other).backend == "transformers"
    for changes in ({"batch_tokens": 40}, {"method": "beam"}):
        assert not settings(tiny_target, **changes).measures_backend


def test_a_distillation_in_which_no_row_has_an_output_fails_and_fails_again(tiny_target, tmp_path):
    rows = tmp_path / "long.txt"
    rows.write_text("w5 w6 w7\nw9 w4 w30\n")
    wanted = ["--target", tiny_target, "--data", rows, "--out", tmp_path / "out"]
    for _ in range(2):
        assert ended("distill", *wanted, "max_source_tokens=1", "sampling.max_new_tokens=8") == 2
    with pytest.raises(ConfigError, match="no output: 2 rows were skipped and 0 failed"):
        load_distilled(tmp_path / "out")


@pytest.fixture
def causal_target(tmp_path) -> Path:
    """A folder with a tiny Llama that often generates EOS, and the word tokenizer."""
    model = tiny_model("llama")
    model.generation_config.update(eos_token_id=[EOS, 15, 21, 25], pad_token_id=0)
    return save_target(model, tmp_path / "target")


def test_a_target_that_penalises_repetition_takes_rows_of_one_length(causal_target):
    target = load_target(settings(causal_target).target)
    target.model.generation_config.update(repetition_penalty=1.3)
    config = settings(causal_target, sentences=10, batch_tokens=40)
    distill(config, target)
    wanted = {"do_sample": False, "num_beams": 1, "max_new_tokens": 12}
    for row in load_distilled(config.out):
        ids = torch.tensor([row["source_ids"]])
        expected = target.model.generate(ids, attention_mask=torch.ones_like(ids), **wanted)[0]
        assert row["target_ids"] == expected[ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_prompts_without_room_for_the_output_are_skipped_by_number(family, tmp_path):
    target = save_target(tiny_model(family), tmp_path / "target")
    config = settings(target, sentences=3, sampling={"max_new_tokens": 60})
    Path(config.data.path).write_text("w4 w5\n\nw4 w5 w6 w7\nw4 w5 w6 w7 w8\n")
    counts = distill(config).counts
    assert (counts.ok, counts.skipped) == (2, 2)
    rows = rows_of(config.out)
    assert [row["reason"] for row in rows if row["status"] == "skipped"] == [
        "empty",
        "5 tokens where 60 new ones leave 4 of the target's 64 positions",
    ]


def test_prompts_and_prefixes_of_speech_take_positions(causal_target, tmp_path):
    config = settings(causal_target, sampling={"max_new_tokens": 64})
    prompt = "64 positions, prompt included; use .*"
    with pytest.raises(ConfigError, match=rf"{prompt}=63 .*distill\.sampling"):
        distill(config)
    assert not config.out.exists()
    speech = settings(save_whisper(tmp_path / "speech"), sampling={"max_new_tokens": 61})
    with pytest.raises(ConfigError, match=rf"{prompt}=60 or less"):
        distill(changed(speech, target={"language": "de"}))  # else, 61 tokens would have room


def test_a_source_may_take_all_positions_of_an_encoder_that_has_more_than_the_decoder(tmp_path):
    target = tiny_seq2seq("led", max_encoder_position_embeddings=104)  # 13 windows
    config = settings(save_target(target, tmp_path / "target"), sentences=2)
    Path(config.data.path).write_text("w5 " * 103 + "\n" + "w5 " * 104)
    assert (counts := distill(config).counts).ok == 1 and counts.skipped == 1
    assert rows_of(config.out)[1]["reason"] == "105 tokens where the target has 104 positions"


TEMPLATE = "{% for turn in messages %}<s> {{ turn.content }} </s> {% endfor %}<s>"


def test_chats_are_distilled_through_the_template(causal_target):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(causal_target)
    turns = [[{"role": "user", "content": line}] for line in ("w4 w5", " ", "w6")]
    path = causal_target.parent / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    config = settings(causal_target, data={"path": str(path)})
    plan = plan_distillation(config)
    assert "3 rows" in plan.text and "in 1 shard" in plan.text
    assert "its answer begins after '<s> w4 w5 </s> <s>'" in plan.text
    counts = distill(config).counts
    assert (counts.ok, counts.skipped) == (2, 1)
    rows = {row["row"]: row for row in rows_of(config.out)}
    assert rows[0]["source_ids"] == [BOS, 4, 5, EOS, BOS]
    assert rows[1]["reason"] == "no user turn, or one without text"
    assert plan.source_tokens == counts.source_tokens
    plain = settings(causal_target, "plain", sentences=1)
    Path(plain.data.path).write_text("w4 w5\n")
    distill(changed(plain, data={"chat": True}))
    assert rows_of(plain.out)[0] == rows[0]
