"""The cached teacher has the target's rows and gives the same training as the online teacher."""

import shutil
from pathlib import Path

import pytest
import torch

from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import CausalDrafterRecipe
from drafttrain.data import teacher
from drafttrain.data.batches.masked_blocks import BlocksCollator
from drafttrain.data.shards.outputs import load_distilled
from drafttrain.data.teacher import TeacherManifest, top_rows, training_examples
from drafttrain.decoding.engine.teacher_forcing import teacher_force
from drafttrain.models.loading import load_target
from drafttrain.training.objectives.follow_target import FollowTarget
from tests.comparing import close
from tests.data.hidden.tiny_cache import make_pair
from tests.tiny_models import EOS, VOCAB, tiny_model
from tests.training.objectives.test_follow_target import EVERY

DRAFTABLE = torch.tensor([EOS, *range(5, 30)])
LOGITS = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).log()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make_pair(tmp_path_factory.mktemp("pair"), "llama")


@pytest.fixture
def pair(made, tmp_path, monkeypatch) -> Path:
    """A copy of the pair, for the cache that a test makes."""
    monkeypatch.setattr(teacher, "SHARD_ROWS", 4)
    return Path(shutil.copytree(made, tmp_path / "pair"))


def settings(pair: Path, **changes) -> CausalDrafterRecipe:
    values = {
        "run": pair / "run",
        "target": {"path": str(pair / "target"), "device": "cpu"},
        "data": {"path": str(pair / "9.txt")},
        "distilled": pair / "distilled",
        "teacher": {"kind": "cached"} | changes,
        "train": {"batch_tokens": 60},
    }
    return CausalDrafterRecipe.model_validate(values)


def cached(pair: Path, draftable: torch.Tensor | None = None, **changes):
    wanted = settings(pair, **changes)
    rows, target = load_distilled(pair / "distilled"), load_target(wanted.target)
    return training_examples(wanted, rows, target, draftable), rows, target


def test_the_likeliest_tokens_and_the_mass_of_the_others_by_hand():
    found = top_rows(LOGITS, 2)
    assert found.tokens.tolist() == [[0, 1], [3, 2]]
    mass = torch.tensor([[0.5, 0.25, 0.25], [0.4, 0.3, 0.3]], dtype=torch.float64)
    close(found.log_probs.exp(), mass)
    drafted = top_rows(LOGITS, 1, torch.tensor([1, 3]))
    assert drafted.tokens.tolist() == [[1], [3]]
    close(drafted.log_probs.exp(), torch.tensor([[0.25, 0.125], [0.4, 0.2]], dtype=torch.float64))
    assert top_rows(LOGITS, 4).log_probs.shape == (2, 4)  # no column for other tokens


@pytest.mark.parametrize("draftable", [None, DRAFTABLE], ids=["all", "few"])
def test_the_rows_on_disk_are_those_of_the_target_at_every_token_of_an_output(pair, draftable):
    found, rows, target = cached(pair, draftable, top_k=5)
    shares = 0.0
    for number, row in enumerate(rows):
        [forced] = teacher_force(target.model, [row["source_ids"]], [row["target_ids"]])
        expected = top_rows(forced.logits, 5, draftable)
        own = found.__getitems__([(0, number)])[0].target_rows
        close(own.log_probs, expected.log_probs, 1e-5)
        close(forced.logits.log_softmax(-1).gather(1, own.tokens), own.log_probs[:, :5], 1e-5)
        shares += float(own.log_probs[:, :5].exp().sum())
    manifest = TeacherManifest.read(pair / "distilled-teacher")
    tokens = sum(map(len, rows["target_ids"]))
    assert manifest.counts == tokens and manifest.shards == 3
    assert manifest.top_k_share == pytest.approx(shares / tokens)


@pytest.mark.parametrize("draftable", [None, DRAFTABLE], ids=["all", "few"])
def test_a_cache_of_all_tokens_equals_the_online_target(pair, draftable):
    wanted, rows = settings(pair, top_k=VOCAB), load_distilled(pair / "distilled")
    target = load_target(wanted.target)
    examples = training_examples(wanted, rows, target, draftable)
    taught = examples.__getitems__([(0, row) for row in range(len(rows))])
    online = [example._replace(target_rows=None) for example in taught]
    collate, losses, gradients = BlocksCollator(0), [], []
    for examples in (taught, online):
        drafter = tiny_model("llama", seed=5).float()
        objective = FollowTarget(drafter, EVERY, target.model, draftable).train()
        sums = objective(collate([examples[:5], examples[5:]]), 0.0)
        (sums.loss / sums.weight).backward()
        losses.append((sums.loss / sums.weight).detach())
        gradients.append(torch.cat([p.grad.flatten() for p in drafter.parameters()]))
    assert abs(float(losses[0] - losses[1])) <= 1e-6
    close(gradients[0], gradients[1], 1e-6)


def test_other_settings_rows_or_targets_are_refused(pair):
    _, rows, target = cached(pair, top_k=5)
    for top_k, draftable, words in ((6, None, "top_k = 5"), (5, DRAFTABLE, "draftable = 40")):
        with pytest.raises(ConfigError, match=f"{words}.* distilled="):
            cached(pair, draftable, top_k=top_k)
    with pytest.raises(ConfigError, match="outputs_sha256|rows = 9"):
        training_examples(settings(pair, top_k=5), rows.select([0]), target, None)
    with torch.no_grad():
        target.model.lm_head.weight += 1
    with pytest.raises(ConfigError, match="target.weights_sha256"):
        training_examples(settings(pair, top_k=5), rows, target, None)
