"""Distillation by our own engine gives the rows that the other backends give."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
import torch

from drafttrain.config.base import ConfigError, Interrupted
from drafttrain.config.commands import DistillConfig
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.recipes import SpecDrafterRecipe
from drafttrain.data.distill import distill as distillation
from drafttrain.data.distill.recipe_rows import distillations, distilled_rows
from drafttrain.data.shards.outputs import Drafting, Manifest, load_distilled
from drafttrain.models.identity import hash_target, hash_weights
from drafttrain.models.loading import load_target
from tests.data.distill.tiny_distill import rows_of, settings
from tests.tiny_drafters import block_heads, noisy, shared, tiny_drafter
from tests.tiny_models import EOS, tiny_model
from tests.tiny_targets import random_sentences, save_target

SAMPLED = {"method": "sample", "sampling": {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}}
LINES = [*random_sentences(14), "", "w5", " ", "w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14"]
"""Rows 14 and 16 are empty, row 17 is too long where max_source_tokens is 10."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets that end at different lengths, and drafters for them."""
    root = tmp_path_factory.mktemp("models")
    for family in ("marian", "llama"):
        target = shared(family) if family == "marian" else tiny_model(family)
        target.generation_config.update(eos_token_id=[EOS, 15, 21, 25], pad_token_id=0)
        save_target(target, root / family)
        drafter = noisy(target, family) if family == "llama" else tiny_model(family, seed=4)
        save_target(drafter, root / f"{family}-small")
    drafter = tiny_drafter("marian", decoder_layers=2)
    drafter.config.target = {"path": str(root / "marian")}
    save_target(drafter, root / "spec-drafter")
    heads = block_heads(is_encoder_decoder=False)
    llama = load_target(TargetConfig(path=str(root / "llama"), device="cpu")).model
    heads.config.target = {"path": "llama", "weights_sha256": hash_target(llama)}
    save_target(heads, root / "block-heads")
    return root


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def made(models: Path, tmp_path: Path, family: str, out: str, **changes) -> DistillConfig:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(LINES) + "\n")
    values = {"data": {"path": str(texts)}, "max_source_tokens": 10, "batch_rows": 3}
    if drafter := changes.get("drafter"):
        local = models / drafter
        changes["drafter"] = str(local) if local.exists() else drafter
    return settings(models / family, sentences=1, **values | changes).model_copy(
        update={"out": tmp_path / out}
    )


def distil(config: DistillConfig) -> Manifest:
    """As the command does."""
    return distillation.distill(config)


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.parquet"))}


PAIRS = [
    ("marian", None),
    ("marian", "marian-small"),
    ("marian", "spec-drafter"),
    ("llama", "max-gram"),
    ("llama", "llama-small"),
    ("llama", "block-heads"),
]


@pytest.mark.parametrize(("family", "drafter"), PAIRS)
def test_greedy_shards_are_those_of_transformers(models, tmp_path, family, drafter):
    plain = made(models, tmp_path, family, "plain")
    asked = {"backend": "engine"} if drafter is None else {"drafter": drafter, "stop": {"k": 3}}
    drafted = made(models, tmp_path, family, "drafted", **asked)
    before, after = distil(plain), distil(drafted)
    assert shards(drafted.out) == shards(plain.out)
    assert after.counts == before.counts
    assert (after.counts.ok, after.counts.skipped) == (15, 3)
    assert 0 < after.counts.truncated < after.counts.ok
    assert (before.backend, before.batch_tokens, before.batch_rows) == ("transformers", 40, None)
    assert (after.backend, after.batch_tokens, after.batch_rows) == ("engine", None, 3)
    assert (after.drafter is None) == (drafter is None)


def test_the_manifest_says_what_drafted(models, tmp_path):
    copied = distil(made(models, tmp_path, "marian", "copied", drafter="max-gram", stop={"k": 4}))
    assert copied.drafter == Drafting(
        path="max-gram", weights_sha256=None, method="max-gram k=4 greedy"
    )
    config = made(models, tmp_path, "marian", "drafted", drafter="marian-small", **SAMPLED)
    drafted = distil(config).drafter
    weights = hash_weights(tiny_model("marian", seed=4).float())
    assert (drafted.weights_sha256, drafted.method) == (weights, "causal k=10 rejection")


@pytest.mark.parametrize(("family", "drafter"), [("marian", "spec-drafter"), ("llama", "max-gram")])
def test_sampled_rows_depend_on_the_seed_and_the_row_alone(models, tmp_path, family, drafter):
    same = {"drafter": drafter, **SAMPLED}
    one = made(models, tmp_path, family, "one", **same)
    two = made(models, tmp_path, family, "two", shard_rows=5, **same | {"batch_rows": 1})
    distil(one)
    distil(two)
    assert rows_of(one.out) == rows_of(two.out)
    seeded = same | {"sampling": {**SAMPLED["sampling"], "seed": 4}}
    three = made(models, tmp_path, family, "three", **seeded)
    distil(three)
    assert rows_of(three.out) != rows_of(one.out)


def test_an_interrupted_run_goes_on_to_the_same_shards(models, tmp_path, monkeypatch):
    same = {"drafter": "llama-small", **SAMPLED}
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
    half = exact.target.model_copy(update={"dtype": "bfloat16"})
    wanted = exact.model_copy(update={"target": half})
    distil(wanted)
    names = ("max_source_tokens", "batch_tokens", "shard_rows")
    same = {name: getattr(wanted, name) for name in names}
    own = {"target": {"dtype": "bfloat16"}, "sampling": {"max_new_tokens": 12}, **same}
    recipe = SpecDrafterRecipe(
        run=tmp_path / "run",
        target=exact.target,
        data=wanted.data,
        distilled=wanted.out,
        distill=own,
    )
    target = load_target(recipe.target)
    rows, _ = distilled_rows(recipe, target)
    assert rows.to_list() == load_distilled(wanted.out).to_list()
    assert target.model.dtype == torch.float32
    [distillation] = distillations(recipe).values()
    assert distillation.encoded is None
    other = recipe.model_copy(update={"distill": {"target": {"path": "elsewhere"}}})
    with pytest.raises(ConfigError, match=r"distill\.target: give it as target="):
        distillations(other)


OTHERS = {
    "backend": ({}, {"backend": "engine"}, "backend = 'transformers', .*'engine'"),
    "a drafter": ({"backend": "engine"}, {"drafter": "max-gram"}, "drafter.method = None, .*gram"),
    "weights": ({"drafter": "marian-small"}, {"drafter": "marian"}, "weights_sha256 .*content"),
    "length": (
        {"drafter": "max-gram"},
        {"drafter": "max-gram", "stop": {"k": 4}},
        "drafter.method = 'max-gram k=10 greedy', .*k=4",
    ),
}


@pytest.mark.parametrize("change", OTHERS)
def test_a_folder_goes_on_under_the_backend_it_was_begun_with(models, tmp_path, change):
    first, second, message = OTHERS[change]
    begun = made(models, tmp_path, "marian", "out", **first)
    distil(begun)
    before = shards(begun.out)
    with pytest.raises(ConfigError, match=message):
        distil(made(models, tmp_path, "marian", "out", **second))
    assert shards(begun.out) == before


def test_a_drafter_may_lie_elsewhere(models, tmp_path):
    config = made(models, tmp_path, "marian", "out", drafter="marian-small")
    distil(config)
    moved = save_target(tiny_model("marian", seed=4).float(), tmp_path / "moved")
    distil(config.model_copy(update={"drafter": str(moved)}))


def test_rows_without_finite_scores_are_errors_and_the_others_are_decoded(tmp_path):
    model = tiny_model("marian")
    with torch.no_grad():
        model.model.encoder.embed_tokens.weight[5] = 1e30  # attention overflows
        model.model.decoder.embed_tokens.weight[5] = 0.0
    save_target(model, tmp_path / "marian")
    plain = made(tmp_path, tmp_path, "marian", "plain")
    drafted = made(tmp_path, tmp_path, "marian", "drafted", drafter="max-gram")
    assert distil(drafted).counts == distil(plain).counts
    assert Manifest.read(plain.out).counts.error > 1
    assert shards(drafted.out) == shards(plain.out)
