"""Hidden states, labels and positions match, and shards do not depend on interruptions."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from drafttrain.config.base import ConfigError
from drafttrain.data.distill.distill import distill
from drafttrain.data.hidden.cache import build_cache, estimate_cache
from drafttrain.data.hidden.labels import row_uniforms
from drafttrain.data.hidden.states import open_cache
from drafttrain.data.shards.outputs import load_distilled
from drafttrain.decoding.engine.teacher_forcing import teacher_force, teacher_forced_states
from drafttrain.decoding.sampling import draw_tokens, warp
from drafttrain.decoding.types import Sampling
from drafttrain.models.draft_states import drawn_state, drawn_states
from drafttrain.models.loading import load_target, read_config
from tests.commanding import ended
from tests.data.distill import tiny_distill
from tests.data.hidden.tiny_cache import MODELS, columns, make_pair, settings
from tests.tiny_models import tiny_model, tiny_seq2seq
from tests.tiny_targets import save_target

WARPING = Sampling(1.0, 20)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def pair(made, tmp_path) -> Path:
    """A copy of the pair, which a test may change."""
    return Path(shutil.copytree(made, tmp_path / "pair"))


def shards(folder: Path) -> dict[str, bytes]:
    paths = sorted(folder.glob("*.safetensors"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("family", MODELS)
def test_token_states_are_at_the_draft_tokens_positions(tmp_path, family):
    """Compared with each model run on one sequence at a time and tokens drawn separately."""
    pair = make_pair(tmp_path, family, sentences=5)
    build_cache(settings(pair, mixing=0.3))
    stored = columns(pair / "out")
    target = load_target(settings(pair).target).model
    drafter = type(target).from_pretrained(pair / "drafter", dtype=torch.float32).eval()
    found = 0
    for row in load_distilled(pair / "distilled"):
        source, output = row["source_ids"], row["target_ids"]
        [judged] = teacher_force(target, [source], [output])
        [drafts] = teacher_force(drafter, [source], [output])
        target_probs, draft_probs = warp(judged.logits, WARPING), warp(drafts.logits, WARPING)
        numbers = row_uniforms(2, 0, row["row"], len(output))
        mixed = list(output)
        mine = stored["rows"] == row["row"]
        assert stored["positions"][mine].tolist() == np.flatnonzero(numbers[:, 1] >= 0.3).tolist()
        for position in stored["positions"][mine].tolist():
            mass = draft_probs[position].double().cumsum(0)
            token = mixed[position] = int((mass <= numbers[position, 0] * mass[-1]).sum())
            label = min(1.0, float(target_probs[position, token] / draft_probs[position, token]))
            at = int((mine & (stored["positions"] == position)).nonzero())
            assert stored["acceptance"][at] == pytest.approx(label, abs=1e-5)
            [alone] = teacher_forced_states(drafter, [source], [mixed[: position + 1]])
            torch.testing.assert_close(stored["hidden"][at], alone[-1], rtol=0, atol=1e-4)
            found += 1
    assert found == len(stored["rows"]) > 15


@pytest.mark.parametrize("family", MODELS)
def test_drawn_states_are_those_of_tokens_drawn_after_the_targets_prefixes(tmp_path, family):
    """Every position is drafted; each is compared with the drafter run on the output before it."""
    pair = make_pair(tmp_path, family, sentences=4)
    manifest = build_cache(settings(pair, state="drawn", mixes=2))
    assert (manifest.settings.state, manifest.settings.token_mixing) == ("drawn", None)
    drafter = type(load_target(settings(pair).target).model).from_pretrained(
        pair / "drafter", dtype=torch.float32
    )
    draws = set()
    for mix in range(2):
        stored = columns(pair / "out", mix)
        for row in load_distilled(pair / "distilled"):
            source, output = row["source_ids"], row["target_ids"]
            mine = stored["rows"] == row["row"]
            assert stored["positions"][mine].tolist() == list(range(len(output)))
            [along] = teacher_force(drafter.eval(), [source], [output])
            numbers = row_uniforms(2, mix, row["row"], len(output))
            tokens = draw_tokens(warp(along.logits, WARPING), torch.from_numpy(numbers[:, :1]))
            draws.add((row["row"], *tokens[:, 0].tolist()))
            states = stored["hidden"][mine]
            expected = drawn_states(along.before, along.logits, tokens[:, 0])
            torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
    assert len(draws) > 5  # each mix draws new tokens


def test_a_drawn_state_by_hand():
    logits = torch.tensor([[2.0, 0.0, -torch.inf]]).double()
    state = drawn_states(torch.tensor([[5.0, 6.0]]).double(), logits, torch.tensor([1]))
    high, low = 1 / (1 + np.exp(-2.0)), 1 / (1 + np.exp(2.0))
    entropy = -high * np.log(high) - low * np.log(low)
    assert state[0].tolist() == pytest.approx(
        [5, 6, np.log(low), np.log(high), np.log(low), entropy, low, high]
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_state_drawn_alone_is_that_of_many(dtype):
    torch.manual_seed(0)
    hidden, logits = torch.randn(4, 3).to(dtype), (3 * torch.randn(4, 9)).to(dtype)
    logits[0, 1:4], logits[1, 1:] = -torch.inf, -torch.inf  # only one token of row 1 can be drawn
    logits[2] = logits[2, 0]  # a tie of the most likely token
    tokens = torch.tensor([5, 2, 0, int(logits[3].argmax())])
    alone = [drawn_state(*one) for one in zip(hidden, logits, tokens.tolist(), strict=True)]
    expected = drawn_states(hidden, logits, tokens)
    exact = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.0}[dtype]
    assert alone[0].dtype == expected.dtype and expected.isfinite().all()
    assert (torch.stack(alone) - expected).abs().max() <= exact


def test_the_targets_own_processors_judge_the_drafted_tokens(pair):
    """Suppressed tokens get the label 0."""
    build_cache(settings(pair, mixing=0.0))
    plain = columns(pair / "out")
    target = load_target(settings(pair).target)
    target.model.generation_config.bad_words_ids = [[token] for token in range(4, 22)]
    build_cache(settings(pair, "strict", mixing=0.0), target)
    strict = columns(pair / "strict")
    assert torch.equal(plain["positions"], strict["positions"])
    assert int((strict["acceptance"] == 0).sum()) > int((plain["acceptance"] == 0).sum())
    other = strict["acceptance"] > 0
    assert (strict["acceptance"][other] >= plain["acceptance"][other] - 1e-6).all()


def test_missing_shards_are_made_again_alike_and_batches_differ_only_by_rounding(pair):
    config = settings(pair, mixes=2)
    first = build_cache(config)
    mixes = [columns(config.out, mix) for mix in range(2)]
    assert first.counts == tuple(len(mix["rows"]) for mix in mixes)
    labels = torch.cat([mix["acceptance"] for mix in mixes])
    assert first.mean_acceptance == pytest.approx(float(labels.mean()))
    assert not torch.equal(mixes[0]["rows"], mixes[1]["rows"])
    whole = shards(config.out)
    assert len(whole) == 3
    (config.out / "shard-00001.safetensors").unlink()
    with pytest.raises(ConfigError, match="2 of 3 shards are there; run the same .drafttrain"):
        open_cache(config.out)
    assert build_cache(config) == first
    assert shards(config.out) == whole
    build_cache(settings(pair, "alone", mixes=2, batch_tokens=1))
    for mix, one in enumerate(mixes):
        other = columns(pair / "alone", mix)
        assert torch.equal(one["rows"], other["rows"])
        assert torch.equal(one["positions"], other["positions"])
        torch.testing.assert_close(one["acceptance"], other["acceptance"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one["hidden"], other["hidden"], rtol=1e-4, atol=1e-4)


def test_rows_without_positions_are_none_of_the_cache(pair):
    config = settings(pair, mixing=0.9)
    build_cache(config)
    cache, stored = open_cache(config.out), columns(config.out)
    assert cache.rows.tolist() == sorted(set(stored["rows"].tolist()))
    assert 1 < len(cache.rows) < 9
    for number, row in enumerate(cache.rows.tolist()):
        hidden, acceptance = cache.read(0, [number])
        assert len(hidden) == cache.lengths()[number]
        assert torch.equal(hidden, stored["hidden"][stored["rows"] == row])
        assert torch.equal(acceptance, stored["acceptance"][stored["rows"] == row])


def test_float16_that_overflows_is_refused_with_the_row(pair):
    model = tiny_model("marian", seed=9)
    with torch.no_grad():
        model.model.decoder.layers[-1].final_layer_norm.weight.mul_(1e6)
    model.save_pretrained(pair / "drafter")
    with pytest.raises(ConfigError, match="row 0: .* torch.float16.* not finite; use dtype=float"):
        build_cache(settings(pair, dtype="float16"))
    assert shards(pair / "out") == {}


def test_outputs_longer_than_the_positions_of_the_drafter_are_cut(pair):
    tiny_model("marian", seed=9, max_position_embeddings=11).save_pretrained(pair / "drafter")
    build_cache(settings(pair, mixing=0.0))
    stored = columns(pair / "out")
    for row in load_distilled(pair / "distilled"):
        length = min(10, len(row["target_ids"]))  # the start token takes a position
        assert int((stored["rows"] == row["row"]).sum()) == length


def test_a_source_may_be_longer_than_the_positions_of_the_decoders(tmp_path):
    target = save_target(tiny_seq2seq("led"), tmp_path / "target")
    distilling = tiny_distill.settings(target, "distilled", 1, **tiny_distill.SAMPLED)
    Path(distilling.data.path).write_text("w5 " * 103)
    [row] = load_distilled(distilling.out) if distill(distilling) else []
    size = len(row["source_ids"])
    for name, positions in {"fits": size, "short": size - 1}.items():
        model = tiny_seq2seq("led", max_encoder_position_embeddings=positions)
        model.save_pretrained(tmp_path / name)
    build_cache(settings(tmp_path, drafter=str(tmp_path / "fits"), mixing=0.0))
    assert len(columns(tmp_path / "out")["rows"]) == len(row["target_ids"])
    with pytest.raises(ConfigError, match="holds no positions"):
        build_cache(settings(tmp_path, "none", drafter=str(tmp_path / "short")))


def test_other_targets_settings_or_models_than_the_folder_was_begun_with_are_refused(pair):
    config, other = settings(pair), save_target(tiny_model("marian", seed=1), pair / "another")
    with pytest.raises(ConfigError, match="distilled from .*/target.*/another.* has other weights"):
        build_cache(settings(pair, target={"path": str(other), "device": "cpu"}))
    assert not config.out.exists()
    build_cache(config)
    before = shards(config.out)
    with pytest.raises(ConfigError, match=r"state = 'token', .*'drawn'"):
        build_cache(settings(pair, state="drawn"))
    tiny_model("marian", seed=8).save_pretrained(pair / "other")
    with pytest.raises(ConfigError, match=r"drafter.weights_sha256 .*another content"):
        build_cache(settings(pair, drafter=str(pair / "other")))
    assert shards(config.out) == before
    (pair / "drafter").rename(pair / "moved")
    build_cache(settings(pair, drafter=str(pair / "moved")))  # identified by content


def test_the_estimate_is_the_size_and_a_dry_run_writes_nothing(pair, capsys):
    config = settings(pair, mixes=2, mixing=0.0)
    file = pair / "cache.yaml"
    file.write_text(json.dumps(config.model_dump(mode="json")))
    assert ended("cache", "--config", file, "--dry-run") == 0
    assert "MiB on disk" in capsys.readouterr().out
    assert not config.out.exists()
    manifest, drafter = build_cache(config), read_config(config.drafter, "drafter")
    tokens = sum(map(len, load_distilled(config.distilled)["target_ids"]))
    positions, disk = estimate_cache(config, drafter, tokens)
    assert positions * 2 == sum(manifest.counts)
    size = sum(len(content) for content in shards(config.out).values())
    assert disk < size < disk + 2048 * len(shards(config.out))


def test_a_damaged_empty_or_strange_cache_is_refused(pair):
    config = settings(pair)
    build_cache(config)
    first, second = (config.out / f"shard-0000{i}.safetensors" for i in range(2))
    first.write_bytes(second.read_bytes())
    with pytest.raises(ConfigError, match="hold .* positions, but its manifest.json says"):
        open_cache(config.out)
    with pytest.raises(ConfigError, match="mix 0 of .* holds no positions"):
        build_cache(settings(pair, "empty", mixing=0.9999999))
    with pytest.raises(ConfigError, match="unfinished"):
        open_cache(pair / "empty")
