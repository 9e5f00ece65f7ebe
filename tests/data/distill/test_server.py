"""Rows from an OpenAI-compatible server are the target's, whatever faults occur on the way."""

import json
import re
import shutil
from pathlib import Path

import pytest

from drafttrain.config.base import ConfigError
from drafttrain.data.distill.distill import distill
from drafttrain.data.distill.server import ServerGone
from drafttrain.data.shards.outputs import Manifest, load_distilled
from drafttrain.models.loading import load_target
from tests.data.distill.fake_server import Fake, serving
from tests.data.distill.tiny_distill import rows_of, settings
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target

SECRET = "sk-very-secret"
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    """The target's folder; next to it is `out`, distilled with Transformers."""
    target = save_target(tiny_model("llama").float(), tmp_path_factory.mktemp("local") / "target")
    distill(settings(target))
    return target


@pytest.fixture(scope="module")
def own_rows(local) -> list[dict]:
    return rows_of(local.parent / "out")


@pytest.fixture
def fake(local, own_rows) -> Fake:
    outputs = {tuple(row["source_ids"]): row["target_ids"] for row in own_rows}
    return Fake(outputs, load_target(settings(local).target).tokenizer)


@pytest.fixture
def ask(local, tmp_path, monkeypatch):
    """Distils from a server address, with settings of `server` and others."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("drafttrain.data.distill.server.TIMEOUT", 5.0)

    def run(url, others=None, target=local, **server):
        server = {"url": url, "concurrency": 4, "extra_body": IDS} | server
        changes = {"out": str(tmp_path / "rows"), "server": server} | (others or {})
        return distill(settings(target, **changes))

    return run


def test_rows_are_those_of_transformers_where_tokens_come_back(ask, fake, own_rows, tmp_path):
    fake.pause = 0.02
    with serving(fake):
        manifest = ask(fake.url)
    assert rows_of(tmp_path / "rows") == own_rows
    assert (manifest.backend, manifest.weights_sha256) == ("server", None)
    assert manifest.counts.ok == manifest.rows == 20
    assert manifest.served_model == "tiny"
    assert (manifest.settings.server.url, manifest.settings.server.extra_body) == (fake.url, IDS)
    assert sorted(fake.prompts) == sorted(fake.outputs) and 1 < fake.most_at_once <= 4
    assert len(load_distilled(tmp_path / "rows")) == 20


def test_retokenized_texts_that_differ_are_errors(ask, fake, own_rows, tmp_path):
    with serving(fake):
        manifest = ask(fake.url, extra_body={})
    special, counts = {0, 2, 3}, manifest.counts  # pad, unk and bos, omitted in texts
    lost = [row["row"] for row in own_rows if special & set(row["target_ids"])]
    assert 0 < len(lost) < 20 and (counts.ok, counts.error) == (20 - len(lost), len(lost))
    for own, row in zip(own_rows, rows_of(tmp_path / "rows"), strict=True):
        if own["row"] in lost:
            assert row["status"] == "error" and "but the server made" in row["reason"]
        else:
            assert row == own
    assert fake.bodies[0].keys() == {"model", "prompt", "max_tokens", "temperature", "top_p"}


def test_a_text_ends_with_the_tokenizers_own_of_several_end_tokens(local, fake, ask, tmp_path):
    target = shutil.copytree(local, tmp_path / "target")
    generation = json.loads((target / "generation_config.json").read_text())
    ends = json.dumps(generation | {"eos_token_id": [39, 1]})
    (target / "generation_config.json").write_text(ends)
    with serving(fake):
        ask(fake.url, target=target, extra_body={})
    ended = [
        row for row in rows_of(tmp_path / "rows") if (row["status"], row["reason"]) == ("ok", "")
    ]
    assert ended and {row["target_ids"][-1] for row in ended} == {1}


def test_sampled_rows_have_seeds_of_their_own_and_all_settings_are_sent(ask, fake, tmp_path):
    sampled = {"max_new_tokens": 12, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3}
    others = {"method": "sample", "sampling": sampled}
    seeds = []
    with serving(fake):
        for name in ("one", "two"):
            fake.bodies = []
            body = IDS | {"top_k": 5}
            ask(fake.url, others=others | {"out": str(tmp_path / name)}, extra_body=body)
            seeds.append({(tuple(body["prompt"]), body["seed"]) for body in fake.bodies})
        first = fake.bodies[0]
        assert (first["temperature"], first["top_k"], first["top_p"]) == (0.7, 5, 0.9)
        assert seeds[0] == seeds[1] and len({seed for _, seed in seeds[0]}) == 20
        with pytest.raises(ConfigError, match=r"top_k = 5 is not in OpenAI's.*extra_body.top_k=5"):
            ask(fake.url, others=others | {"out": str(tmp_path / "other")})
    assert not (tmp_path / "other").exists()


TROUBLES = {
    "busy": (429, {"error": {"message": "slow down"}}),
    "broken": (500, {"detail": "boom"}),
    "cut": "cut",
}


def test_rows_that_fail_once_are_requested_again(ask, fake, own_rows, tmp_path):
    troubles = dict(zip((0, 3, 6), TROUBLES.values(), strict=True))
    fake.trouble = lambda number, prompt: troubles.get(number % 9)
    with serving(fake):
        ask(fake.url)
    assert rows_of(tmp_path / "rows") == own_rows
    assert len(fake.prompts) > 20


def test_a_row_that_a_living_server_does_not_answer_is_an_error(ask, fake, tmp_path):
    troubles = {
        "poison": (500, {"error": {"message": "poison"}}),
        "too long": (400, {"error": {"message": "too long"}}),
        "Connection error": "cut",
        "not an answer of /v1/comp": (200, {"choices": []}),
        "not an answer of /v1/completions": (200, "<html>hello</html>"),
    }
    bad = dict(zip(sorted(fake.outputs), troubles, strict=False))
    fake.trouble = lambda number, prompt: troubles.get(bad.get(prompt))
    with serving(fake):
        manifest = ask(fake.url)
    assert (manifest.counts.ok, manifest.counts.error) == (15, 5)
    rows = {tuple(row["source_ids"]): row["reason"] for row in rows_of(tmp_path / "rows")}
    for prompt, words in bad.items():
        assert re.match(f"server {fake.url}: .*({words})", rows[prompt])
    first, second, *_ = bad
    assert fake.prompts.count(first) == 7 and fake.prompts.count(second) == 1


def test_nothing_is_written_if_all_rows_fail_or_the_model_is_another(ask, fake, tmp_path):
    with serving(fake):
        with pytest.raises(ConfigError, match="has the models 'tiny', not 'large'"):
            ask(fake.url, model="large")
        fake.trouble = lambda number, prompt: (400, {"error": {"message": "no such thing"}})
        with pytest.raises(ServerGone, match="all of 8 rows failed.*no such thing"):
            ask(fake.url)
        fake.models = None
        with pytest.raises(ConfigError, match="does not list its models"):
            ask(fake.url, others={"out": str(tmp_path / "other")})
    assert rows_of(tmp_path / "rows") == [] and not (tmp_path / "other").exists()


@pytest.mark.parametrize("end", ["hangs up", "is busy", "denies"])
def test_a_server_that_ends_in_the_middle_loses_and_doubles_no_row(
    ask, fake, own_rows, tmp_path, end
):
    troubles = {"is busy": TROUBLES["busy"], "denies": (401, {"error": "who?"}), "hangs up": "cut"}

    def trouble(number, prompt):
        if number < 11:
            return None
        fake.gone = end == "hangs up"
        return troubles[end]

    fake.trouble = trouble
    with serving(fake), pytest.raises(ServerGone, match="run the same command again"):
        ask(fake.url)
    done = rows_of(tmp_path / "rows")
    assert done == own_rows[:8]  # a whole shard
    fake.trouble, fake.prompts, fake.gone = (lambda number, prompt: None), [], False
    with serving(fake):
        ask(fake.url)
    assert rows_of(tmp_path / "rows") == own_rows
    assert not {tuple(row["source_ids"]) for row in done} & set(fake.prompts)


def test_the_key_goes_to_the_server_and_nowhere_else(ask, fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    leaks = (400, {"error": {"message": f"Incorrect API key provided: {SECRET}"}})
    first = sorted(fake.outputs)[0]
    fake.trouble = lambda number, prompt: leaks if prompt == first else None
    with serving(fake):
        ask(fake.url)
    assert fake.keys == {f"Bearer {SECRET}"}
    fake.trouble = lambda number, prompt: (401, {"error": {"message": "x" * 150 + SECRET}})
    with serving(fake), pytest.raises(ServerGone) as denied:
        ask(fake.url, others={"out": str(tmp_path / "denied")})
    assert "OPENAI_API_KEY" in str(denied.value) and SECRET[:6] not in str(denied.value)
    printed = "".join(capsys.readouterr())
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    reasons = [row["reason"] for row in rows_of(tmp_path / "rows")]
    assert SECRET not in printed + "".join(reasons) and SECRET.encode() not in stored
    assert any("provided: ***" in reason for reason in reasons)
    with pytest.raises(ConfigError, match="an address with host, port and path only") as wrong:
        ask(f"http://me:{SECRET}@host:80/v1")
    assert SECRET not in str(wrong.value)
    monkeypatch.setenv("OPENAI_API_KEY", f"{SECRET}\nX-Other: 1")
    with pytest.raises(ConfigError, match="OPENAI_API_KEY contains") as odd:
        ask(fake.url, others={"out": str(tmp_path / "odd")})
    assert SECRET not in str(odd.value)


WRONG = {
    "another tokenizer's prompt": ({"usage": {"prompt_tokens": 99}}, "read 99 prompt tokens"),
    "a token that is none": ({"token_ids": [5, 400]}, "token 400 is not among the target's 40"),
    "no tokens": ({"token_ids": []}, "the answer has no tokens"),
    "another text": ({"text": "something else"}, "decodes the server's tokens to another text"),
    "cut": ({"token_ids": [5, 6], "finish_reason": "length"}, "length: cut after 2 tokens"),
    "filtered": ({"finish_reason": "content_filter"}, "content_filter: cut after"),
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


def test_distilling_continues_at_another_address_but_not_with_another_model(ask, fake, tmp_path):
    with serving(fake):
        ask(fake.url)
    next((tmp_path / "rows").glob("*.parquet")).unlink()
    with serving(fake):
        assert ask(fake.url).counts.ok == 20
    next((tmp_path / "rows").glob("*.parquet")).unlink()
    fake.models = ("another",)
    with serving(fake), pytest.raises(ConfigError, match="served_model = 'tiny'.*'another'"):
        ask(fake.url)
    assert Manifest.read(tmp_path / "rows").served_model == "tiny"


def test_settings_that_are_not_sent_to_servers_are_refused(local, fake, tmp_path):
    target = Path(shutil.copytree(local, tmp_path / "strict"))
    file = target / "generation_config.json"
    for name, value in {"no_repeat_ngram_size": 2, "repetition_penalty": 1.5}.items():
        file.write_text(json.dumps({name: value}))
        with serving(fake), pytest.raises(ConfigError, match=f"{name}.* {value}"):
            distill(settings(target, server={"url": fake.url, "extra_body": IDS}))
