"""Rows distilled from servers are the target's own, whatever happens on the way."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import replace

import pytest

from drafttrain.commands.distill import check_backend, open_decoder
from drafttrain.config.base import ConfigError, Interrupted
from drafttrain.data.distill import distill as distillation
from drafttrain.data.distill.server.workers import ServersGone
from drafttrain.data.shards.outputs import load_distilled, read_manifest
from tests.data.distill.server.fake import serving
from tests.data.distill.tiny_distill import rows_of, settings

SECRET = "sk-very-secret"


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch):
    for name in ("DRAFTTRAIN_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ask(local, tmp_path):
    """Distil from the addresses, with settings of `server` and others."""

    def run(*urls, others=None, opener=open_decoder, **server):
        quick = {"concurrency": 4, "backoff": 0.01, "retries": 3, "timeout": 5.0}
        given = {"urls": list(urls)} | quick | server
        changes = {"out": str(tmp_path / "rows"), "server": given} | (others or {})
        config = settings(local, **changes)
        check_backend(config)
        return distillation.distill(config, open_decoder=opener)

    return run


@pytest.mark.parametrize("program", ["vllm", "llama.cpp"])
def test_rows_are_those_of_transformers_where_tokens_come_back(
    ask, fake, own_rows, tmp_path, program
):
    fake.program, fake.pause = program, 0.02
    with serving(fake):
        manifest = ask(fake.url + "/v1")
        # one that is alive when Python ends may abort it
        assert not [one for one in threading.enumerate() if "(_work)" in one.name]
    assert rows_of(tmp_path / "rows") == own_rows
    assert (manifest.backend, manifest.weights_sha256, manifest.dtype) == ("server", None, None)
    assert manifest.counts.ok == manifest.rows == 20
    assert manifest.server.model_dump() == {
        "urls": [fake.url],
        "programs": [{"llama.cpp": "llamacpp"}.get(program, program)],
        "model": "tiny",
        "prompts": "tokens",
    }
    assert sorted(fake.asked) == sorted(fake.outputs) and 1 < fake.most_at_once <= 4
    assert len(load_distilled(tmp_path / "rows")) == 20


@pytest.mark.parametrize(("program", "prompts"), [("sglang", "tokens"), ("transformers", "text")])
def test_texts_are_tokenised_again_and_what_differs_is_an_error_and_counted(
    ask, fake, own_rows, tmp_path, program, prompts, capsys
):
    fake.program = program
    with serving(fake):
        manifest = ask(fake.url, prompts=prompts)
    special, counts = {0, 2, 3}, manifest.counts  # pad, unk and bos: left out of a text
    lost = [row["row"] for row in own_rows if special & set(row["target_ids"])]
    assert 0 < len(lost) < 20 and (counts.ok, counts.error) == (20 - len(lost), len(lost))
    assert counts.retokenised == len(lost)
    for own, row in zip(own_rows, rows_of(tmp_path / "rows"), strict=True):
        if own["row"] in lost:
            assert row["status"] == "error" and "where the server made" in row["reason"]
        else:
            assert row == own
    assert f"{len(lost)} came as text that gives other tokens" in capsys.readouterr().err
    if prompts == "text":
        assert all(body.keys() <= PLAIN_FIELDS for body in fake.bodies)


PLAIN_FIELDS = {"model", "prompt", "max_tokens", "temperature", "top_p", "seed"}


def test_each_program_is_told_all_that_it_would_else_take_from_elsewhere(ask, fake, tmp_path):
    sampled = {"max_new_tokens": 12, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3}
    others = {"method": "sample", "sampling": sampled}
    seeds = []
    for program in ("vllm", "llama.cpp", "sglang"):
        fake.program, fake.bodies = program, []
        with serving(fake):
            ask(fake.url, others=others | {"out": str(tmp_path / program)})
        first = fake.bodies[0]
        assert (first["temperature"], first["top_k"], first["top_p"]) == (0.7, 5, 0.9)
        assert first["min_p"] == 0.0
        seeds.append({(tuple(body["prompt"]), body["seed"]) for body in fake.bodies})
    assert seeds[0] == seeds[1] == seeds[2] and len({seed for _, seed in seeds[0]}) == 20
    fake.program = "transformers"
    with serving(fake), pytest.raises(ConfigError, match="sampling.top_k = 5 is not in OpenAI's"):
        ask(fake.url, others=others | {"out": str(tmp_path / "other")})
    assert not (tmp_path / "other").exists()


TROUBLES = {
    "busy": (429, {"error": {"message": "slow down"}}, {"Retry-After": "0"}),
    "broken": (500, {"detail": "boom"}),
    "nonsense": (200, "<html>hello</html>"),
    "another shape": (200, {"choices": []}),
    "cut": "cut",
}


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES)
def test_rows_that_fail_once_are_asked_for_again(ask, fake, own_rows, tmp_path, trouble):
    fake.trouble = lambda number, prompt: trouble if number % 3 == 0 else None
    with serving(fake):
        ask(fake.url, retries=6)
    assert rows_of(tmp_path / "rows") == own_rows
    assert len(fake.asked) > 20


def test_a_slow_answer_is_asked_for_again(ask, fake, own_rows, tmp_path):
    slow = sorted(fake.outputs)[0]

    def trouble(number, prompt):
        if prompt == slow and fake.asked.count(slow) == 1:
            time.sleep(0.6)

    fake.trouble = trouble
    with serving(fake):
        ask(fake.url, timeout=0.3)
    assert rows_of(tmp_path / "rows") == own_rows and fake.asked.count(slow) == 2


def test_a_row_that_a_living_server_never_answers_is_an_error(ask, fake, own_rows, tmp_path):
    bad, refused = sorted(fake.outputs)[:2]

    def trouble(number, prompt):
        if prompt == bad:
            return 500, {"error": {"message": "poison"}}
        return (400, {"error": {"message": "too long"}}) if prompt == refused else None

    fake.trouble = trouble
    with serving(fake):
        manifest = ask(fake.url)
    assert (manifest.counts.ok, manifest.counts.error) == (18, 2)
    reasons = {row["reason"] for row in rows_of(tmp_path / "rows") if row["status"] == "error"}
    assert reasons == {
        f"server {fake.url}: 500: 'poison', 4 times",
        f"server {fake.url}: 400: 'too long'",
    }
    assert fake.asked.count(bad) == 4 and fake.asked.count(refused) == 1


def test_where_all_rows_fail_nothing_is_written(ask, fake, tmp_path):
    fake.trouble = lambda number, prompt: (400, {"error": {"message": "no such thing"}})
    with serving(fake), pytest.raises(ServersGone, match="all of 8 rows failed.*no such thing"):
        ask(fake.url)
    assert rows_of(tmp_path / "rows") == []


@pytest.mark.parametrize("end", ["refuses", "hangs up", "is busy", "denies"])
def test_a_server_that_ends_in_the_middle_loses_and_doubles_no_row(
    ask, fake, own_rows, tmp_path, end, monkeypatch
):
    troubles = {"is busy": TROUBLES["busy"], "denies": (401, {"error": "who?"}), "hangs up": "cut"}
    with serving(fake):
        if end == "refuses":  # the port is closed while rows are under way
            fake.trouble = lambda number, prompt: "cut" if number >= 11 else None
            monkeypatch.setattr(
                "drafttrain.data.distill.server.workers.is_alive", lambda connection: False
            )
        else:
            fake.trouble = lambda number, prompt: troubles[end] if number >= 11 else None
        if end == "hangs up":
            monkeypatch.setattr(
                "drafttrain.data.distill.server.workers.is_alive", lambda connection: False
            )
        with pytest.raises(ServersGone, match="run the same command again"):
            ask(fake.url)
    done = rows_of(tmp_path / "rows")
    assert done == own_rows[:8]  # a whole shard
    monkeypatch.undo()
    fake.trouble, fake.asked = (lambda number, prompt: None), []
    with serving(fake):
        ask(fake.url)
    assert rows_of(tmp_path / "rows") == own_rows
    assert not {tuple(row["source_ids"]) for row in done} & set(fake.asked)


def test_an_interruption_is_gone_on_from(ask, fake, own_rows, tmp_path):
    def open_interrupted(config, target):
        decoder = open_decoder(config, target)

        def decode(rows):
            if len(fake.asked) >= 8:
                raise KeyboardInterrupt
            return decoder.decode(rows)

        return replace(decoder, decode=decode)

    with serving(fake):
        with pytest.raises(Interrupted, match="1 of 3 shards"):
            ask(fake.url, opener=open_interrupted)
        ask(fake.url)
    assert rows_of(tmp_path / "rows") == own_rows
    assert sorted(fake.asked) == sorted(fake.outputs)


def test_rows_are_shared_out_among_servers_and_one_may_die(ask, fake, own_rows, tmp_path, capsys):
    other = type(fake)(fake.outputs, fake.tokenizer, program="llama.cpp")
    other.trouble = lambda number, prompt: (403, {"error": "gone"}) if number >= 2 else None
    fake.pause = other.pause = 0.02
    with serving(fake), serving(other):
        manifest = ask(fake.url, other.url)
    assert rows_of(tmp_path / "rows") == own_rows
    assert len(fake.asked) >= 12 and len(other.asked) >= 3
    assert manifest.server.programs == ["vllm", "llamacpp"]
    told = capsys.readouterr().err
    assert told.count("going on with 1 other") == 1 and other.url in told


def test_the_key_goes_to_the_server_and_nowhere_else(ask, fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    monkeypatch.setenv("DRAFTTRAIN_API_KEY", SECRET)
    leaks = (400, {"error": {"message": f"Incorrect API key provided: {SECRET}"}})
    first = sorted(fake.outputs)[0]
    fake.trouble = lambda number, prompt: leaks if prompt == first else None
    with serving(fake):
        ask(fake.url)
    assert fake.keys == {f"Bearer {SECRET}"}
    fake.trouble = lambda number, prompt: (401, {"error": {"message": "x" * 150 + SECRET}})
    with serving(fake), pytest.raises(ServersGone) as denied:
        ask(fake.url, others={"out": str(tmp_path / "denied")})
    assert "DRAFTTRAIN_API_KEY" in str(denied.value) and SECRET[:6] not in str(denied.value)
    printed = "".join(capsys.readouterr())
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    reasons = [row["reason"] for row in rows_of(tmp_path / "rows")]
    assert SECRET not in printed + "".join(reasons) and SECRET.encode() not in stored
    assert any("provided: ***" in reason for reason in reasons)
    monkeypatch.setenv("DRAFTTRAIN_API_KEY", f"{SECRET}\nX-Other: 1")
    with pytest.raises(ConfigError, match="DRAFTTRAIN_API_KEY holds characters") as odd:
        ask(fake.url, others={"out": str(tmp_path / "odd")})
    assert SECRET not in str(odd.value)


@pytest.mark.parametrize(
    ("urls", "says"),
    [
        (["http://127.0.0.1:1"], "server http://127.0.0.1:1: the connection failed"),
        (["http://me:sk-very-secret@host:80/v1"], "the address of 'host' holds more than"),
        (["http://host/v1?api_key=sk-very-secret"], "the address of 'host' holds more than"),
        (["ftp://host"], "'ftp://host' is no address"),
        (["http://host:port"], "one of them is no address"),
    ],
)
def test_wrong_addresses_are_refused_before_anything_is_written(ask, tmp_path, urls, says):
    with pytest.raises(ConfigError) as refused:
        ask(*urls)
    assert says in str(refused.value) and SECRET not in str(refused.value)
    assert not (tmp_path / "rows").exists()


def test_another_program_or_model_behind_the_address_is_refused(ask, fake, tmp_path):
    with serving(fake):
        with pytest.raises(ConfigError, match=r"has the models 'tiny', not 'large'"):
            ask(fake.url, model="large")
        with pytest.raises(ConfigError, match="knows no such page.*ends in /v1"):
            ask(fake.url + "/somewhere/else")
        fake.model = None
        with pytest.raises(ConfigError, match="gives no list of models"):
            ask(fake.url)
    assert not (tmp_path / "rows").exists()


WRONG = {
    "another tokenizer's prompt": ({"usage": {"prompt_tokens": 99}}, "read 99 prompt tokens"),
    "a token that is none": ({"token_ids": [5, 400]}, "token 400 is not among the target's 40"),
    "no tokens": ({"token_ids": []}, "an answer without tokens"),
    "another text": ({"text": "something else"}, "not what the target's tokenizer makes"),
    "a small context": (
        {"token_ids": [5, 6], "finish_reason": "length"},
        "cut after 2 tokens",
    ),
}


@pytest.mark.parametrize(("changes", "says"), WRONG.values(), ids=WRONG)
def test_answers_that_cannot_be_the_targets_are_errors(ask, fake, tmp_path, changes, says):
    ended = next(p for p, o in sorted(fake.outputs.items()) if o[-1] == 1 and len(o) > 2)
    right = fake.answer

    def answer(body, prompt):
        found = right(body, prompt)
        if prompt == ended:
            found["usage"] |= changes.get("usage", {})
            found["choices"][0] |= {k: v for k, v in changes.items() if k != "usage"}
        return found

    fake.answer = answer
    with serving(fake):
        manifest = ask(fake.url)
    assert (manifest.counts.ok, manifest.counts.error) == (19, 1)
    [row] = [row for row in rows_of(tmp_path / "rows") if row["status"] == "error"]
    assert says in row["reason"]


def test_a_folder_goes_on_at_another_address_but_not_with_another_model(ask, fake, tmp_path):
    with serving(fake):
        ask(fake.url)
    next((tmp_path / "rows").glob("*.parquet")).unlink()
    fake.program = "llama.cpp"
    with serving(fake):
        assert ask(fake.url).counts.ok == 20
    file = tmp_path / "rows" / "manifest.json"
    assert re.search(r'"programs": \[\s*"vllm"\s*\]', file.read_text())
    next((tmp_path / "rows").glob("*.parquet")).unlink()
    fake.model = "another"
    with serving(fake), pytest.raises(ConfigError, match="server.model = 'tiny'.*'another'"):
        ask(fake.url)
    assert read_manifest(tmp_path / "rows").server.model == "tiny"


def test_what_servers_are_not_told_is_refused(local, ask, fake, tmp_path):
    file = local / "generation_config.json"
    before = file.read_text()
    file.write_text(json.dumps(json.loads(before) | {"no_repeat_ngram_size": 2}))
    try:
        with serving(fake), pytest.raises(ConfigError, match="no_repeat_ngram_size=2"):
            ask(fake.url)
    finally:
        file.write_text(before)


def test_encoder_decoder_targets_and_other_backends_are_refused(tiny_target):
    server = {"server": {"urls": ["http://127.0.0.1:1"]}}
    with pytest.raises(ConfigError, match="encoder-decoder model; leave --server out"):
        check_backend(settings(tiny_target, **server))
    with pytest.raises(ConfigError, match="backend is 'transformers'; leave one of them out"):
        check_backend(settings(tiny_target, **server, backend="transformers"))
    with pytest.raises(ConfigError, match="there is no address; give --server"):
        check_backend(settings(tiny_target, backend="server"))
