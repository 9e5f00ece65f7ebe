"""Distillation with the engine gives the same rows as the other backends."""

from pathlib import Path

import pytest
import torch

from drafttrain.config.base import ConfigError, Interrupted
from drafttrain.config.commands import DistillConfig
from drafttrain.config.recipes import SpecDrafterRecipe
from drafttrain.data.distill import distill as distillation
from drafttrain.data.distill.batches import BatchDecoder
from drafttrain.data.distill.distill import distill as distil
from drafttrain.data.distill.engine import open_engine
from drafttrain.data.distill.recipe_rows import distillations, distilled_rows
from drafttrain.data.shards.outputs import Manifest, ShardRow, load_distilled
from drafttrain.models.loading import load_target
from tests.data.distill.tiny_distill import SAMPLED, changed, rows_of, settings, shards
from tests.tiny_drafters import shared
from tests.tiny_models import EOS, tiny_model
from tests.tiny_targets import random_sentences, save_target

LINES = [*random_sentences(14), "", "w5", " ", "w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14"]
"""Rows 14 and 16 are empty, row 17 is too long if max_source_tokens is 10."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Targets whose outputs have different lengths."""
    root = tmp_path_factory.mktemp("models")
    for family in ("marian", "llama"):
        target = shared(family) if family == "marian" else tiny_model(family)
        target.generation_config.update(eos_token_id=[EOS, 15, 21, 25], pad_token_id=0)
        save_target(target, root / family)
    return root


def made(models: Path, tmp_path: Path, family: str, out: str, **changes) -> DistillConfig:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(LINES) + "\n")
    values = {"data": {"path": str(texts)}, "max_source_tokens": 10, "batch_rows": 3}
    return changed(settings(models / family, sentences=1, **values | changes), out=tmp_path / out)


def check_backends_agree(plain: DistillConfig, looped: DistillConfig) -> None:
    before, after = distil(plain), distil(looped)
    assert (before.backend, after.backend) == ("transformers", "engine")
    assert shards(looped.out) == shards(plain.out)
    assert after.counts == before.counts
    assert (after.counts.ok, after.counts.skipped) == (15, 3)
    assert 0 < after.counts.truncated < after.counts.ok


@pytest.mark.parametrize("family", ["marian", "llama"])
def test_greedy_shards_are_those_of_transformers(models, tmp_path, family):
    plain = made(models, tmp_path, family, "plain")
    looped = made(models, tmp_path, family, "looped", backend="engine")
    check_backends_agree(plain, looped)
    with pytest.raises(ConfigError, match="backend = 'transformers', .*'engine'"):
        distil(changed(looped, out=plain.out))


@pytest.mark.parametrize("family", ["marian", "llama"])
def test_sampled_rows_depend_only_on_seed_and_row(models, tmp_path, family):
    """Not on backend, batches and shards."""
    plain = made(models, tmp_path, family, "plain", **SAMPLED)
    check_backends_agree(plain, made(models, tmp_path, family, "l", backend="engine", **SAMPLED))
    for few in ({"backend": "engine", "batch_rows": 1}, {"batch_tokens": 12}):
        other = made(models, tmp_path, family, str(len(few)), shard_rows=5, **SAMPLED | few)
        distil(other)
        assert rows_of(other.out) == rows_of(plain.out)
    sampling = {**SAMPLED["sampling"], "seed": 4}
    seeded = made(models, tmp_path, family, "seeded", method="sample", sampling=sampling)
    distil(seeded)
    assert rows_of(seeded.out) != rows_of(plain.out)


def test_an_interrupted_distillation_continues_to_the_same_shards(models, tmp_path, monkeypatch):
    same = {"backend": "engine", **SAMPLED}
    whole = made(models, tmp_path, "llama", "whole", **same)
    config, write = made(models, tmp_path, "llama", "cut", **same), distillation.write_shard

    def interrupted(path, rows):
        if path.name == "shard-00001.parquet":
            raise KeyboardInterrupt
        write(path, rows)

    with monkeypatch.context() as patched:
        patched.setattr(distillation, "write_shard", interrupted)
        with pytest.raises(Interrupted, match="1 of 3 shards"):
            distil(config)
    assert list(shards(config.out)) == ["shard-00000.parquet"]
    assert distil(config).counts == distil(whole).counts
    assert shards(config.out) == shards(whole.out)


def test_recipes_may_distil_in_another_precision_than_they_train_for(models, tmp_path):
    exact = made(models, tmp_path, "marian", "half")
    wanted = changed(exact, target={"dtype": "bfloat16"})
    distil(wanted)
    names = ("max_source_tokens", "batch_tokens", "shard_rows")
    same = {name: getattr(wanted, name) for name in names}
    own = {"target": {"dtype": "bfloat16"}, "sampling": {"max_new_tokens": 12}, **same}
    places = {"run": tmp_path / "run", "data": wanted.data, "distilled": wanted.out}
    recipe = SpecDrafterRecipe(**places, target=exact.target, distill=own)
    target = load_target(recipe.target)
    rows, _ = distilled_rows(recipe, target)
    assert rows.to_list() == load_distilled(wanted.out).to_list()
    assert target.model.dtype == torch.float32
    other = recipe.model_copy(update={"distill": {"target": {"path": "elsewhere"}}})
    with pytest.raises(ConfigError, match=r"distill\.target: give it as target="):
        distillations(other)


def test_rows_without_finite_scores_are_errors_and_the_others_are_decoded(tmp_path):
    model = tiny_model("marian")
    with torch.no_grad():
        model.model.encoder.embed_tokens.weight[5] = 1e30  # attention overflows
        model.model.decoder.embed_tokens.weight[5] = 0.0
    save_target(model, tmp_path / "marian")
    plain = made(tmp_path, tmp_path, "marian", "plain")
    looped = made(tmp_path, tmp_path, "marian", "looped", backend="engine")
    assert distil(looped).counts == distil(plain).counts
    assert Manifest.read(plain.out).counts.error > 1
    assert shards(looped.out) == shards(plain.out)


def test_a_row_is_counted_when_it_ends(models, tmp_path):
    config = made(models, tmp_path, "marian", "rows", backend="engine", batch_rows=1)
    target, calls = load_target(config.target), []
    target.model.register_forward_hook(lambda *_: calls.append(1))
    decoder = open_engine(config, target)
    calls.clear()
    rows = [ShardRow(row, source_ids=[5 + row, 6, EOS]) for row in range(3)]
    ends = [(index, len(calls)) for index, _ in decoder.decode(rows)]
    assert sorted(index for index, _ in ends) == [0, 1, 2]
    assert ends[0][1] < ends[1][1] < ends[2][1] == len(calls)


def test_rows_that_ended_before_memory_ran_out_are_not_decoded_again(models, tmp_path):
    config = made(models, tmp_path, "marian", "memory")
    calls = []

    def decode(rows):
        calls.append([row.row for row in rows])
        for index, row in enumerate(rows):
            if row.row == 3 or (len(rows) > 2 and index == 1):
                raise torch.OutOfMemoryError
            yield index, [row.row, EOS]

    decoder = BatchDecoder("engine", decode, lambda rows: [rows])
    filling = distillation.Distilling(config, load_target(config.target), None, decoder)
    rows = [ShardRow(number, source_ids=[5, EOS]) for number in range(4)]
    done = [row for batch in filling._decode_batch(rows) for row in batch]
    assert calls == [[0, 1, 2, 3], [1], [2, 3], [3]]
    assert [row.row for row in done] == [0, 1, 2, 3]
    assert [row.status for row in done] == ["ok", "ok", "ok", "error"]
    assert "out of memory" in done[3].reason
