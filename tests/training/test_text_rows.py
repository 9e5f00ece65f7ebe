"""Rows behind prompts that the target has read: in training as in decoding, and by hand."""

from __future__ import annotations

import pytest
import torch

from drafttrain.build.drafters import make_drafter
from drafttrain.config.recipes import FollowInBlocksConfig, FollowTargetConfig
from drafttrain.data.batches.examples import Example
from drafttrain.data.batches.masked_blocks import BlocksBatch, BlocksCollator
from drafttrain.data.batches.packing import DocumentCollator
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.shared import alone
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.types import Sampling
from drafttrain.training.objectives.follow_blocks import FollowInBlocks
from drafttrain.training.objectives.follow_target import FollowTarget
from drafttrain.training.text_rows import Columns, read_prompts, text_rows
from tests.comparing import close
from tests.decoding.engine.test_modules import any_family
from tests.tiny_drafters import behind_prompts
from tests.tiny_models import tiny_model

MASK, K, LAYERS = 3, 4, (1, 3)
ROWS = [
    ([5, 9, 20, 7], [11, 30, 12, 8, 25, 1]),
    ([9, 20, 7, 30, 11, 6], [30, 12, 8, 25, 1]),
    ([21], [12, 8, 1]),
    ([8, 15], [1]),
]
"""Of the last one nothing is learned: the target tells its only token."""


def examples() -> list[Example]:
    return [Example(0, row, source, target) for row, (source, target) in enumerate(ROWS)]


def randomness() -> SampledRandomness:
    return SampledRandomness(torch.Generator().manual_seed(0))


def batch_places(batch: BlocksBatch) -> list[tuple[int, int, int]]:
    """Of each labelled position: its row (two a sequence), its anchor's position, its slot."""
    counted, slots = batch.labels >= 0, batch.slots()
    rows = 2 * counted.nonzero()[:, 0] + batch.documents[counted]
    anchors = batch.positions[counted] - slots
    return list(zip(rows.tolist(), anchors.tolist(), slots.tolist(), strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gpt-neox", "opt"])
def test_rows_in_training_are_rows_in_decoding(family: str) -> None:
    """Rows two of which share a sequence, with masks; and each alone, without."""
    target = tiny_model(family, num_hidden_layers=4)
    model = behind_prompts(target, LAYERS, K)
    blocks = FollowInBlocks(model, FollowInBlocksConfig(), target).eval()
    chains = FollowTarget(model, FollowTargetConfig(), target).eval()
    together = [examples()[:2], examples()[2:]]
    batch = BlocksCollator(0, MASK, K, reads_prompt=False)(together)
    with torch.no_grad():
        found = dict(zip(batch_places(batch), blocks.rows(batch)[0], strict=True))
        collate = DocumentCollator(0, reads_prompt=False)
        apart, labels = chains.rows(collate.alone(examples()))
        packed, _ = chains.rows(collate(together))
    close(packed, apart)
    assert labels.tolist() == [token for one in examples() for token in one.target_ids[1:]]
    drafter, cached, firsts = make_drafter(model, target), CachedModel(target), iter(apart)
    for number, example in enumerate(examples()):
        source = make_source(example.source_ids, target)
        session = drafter.open(source, Sampling(1.0), randomness())
        prompt = cached.read(source, drafter.requires).prompt
        for place in range(1, len(example.target_ids)):
            tokens = torch.tensor(example.source_ids + example.target_ids[:place])
            state = TargetState(len(tokens), prompt=prompt)
            drawn_from = alone(session.propose(tokens, state, FixedLength(K))).draft_probs
            close(drawn_from[0], next(firsts).softmax(-1))
            for slot in range(min(K, len(example.target_ids) - place)):
                close(drawn_from[slot], found.pop((number, len(tokens) - 1, slot)).softmax(-1))
            assert session.own.state.tokens == tokens.tolist()  # masks leave no trace
    assert not found and next(firsts, None) is None


def test_with_all_layers_of_the_target_rows_are_the_targets() -> None:
    target = tiny_model("qwen2", num_hidden_layers=3)
    batch = DocumentCollator(0, reads_prompt=False)([examples()])
    prompts = read_prompts(target, batch, range(3))
    with torch.no_grad():
        wanted = torch.tensor([4, 8, 30])
        close(text_rows(target, batch, wanted, prompts), text_rows(target, batch)[:, wanted])


def test_the_target_learns_nothing_and_the_drafters_own_keys_do() -> None:
    target = tiny_model("llama", num_hidden_layers=4)
    model = behind_prompts(target, LAYERS, K)
    objective = FollowInBlocks(model, FollowInBlocksConfig(), target).train()
    batch = BlocksCollator(0, MASK, K, reads_prompt=False)([examples()])
    objective(batch, 0.0).loss.backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    for layer in model.model.layers:
        assert (layer.self_attn.k_proj.weight.grad != 0).any()


def test_some_columns_see_what_the_mask_lets_them() -> None:
    rows = Columns.where(torch.tensor([[False, True, False, True], [False, False, True, False]]))
    seen = Columns.where(torch.tensor([[True, False, False, False], [True, True, False, False]]))
    assert rows.places[rows.there].tolist() == [1, 3, 2]
    assert rows.there.tolist() == [[True, True], [True, False]]
    mask = torch.arange(32.0).view(2, 1, 4, 4)
    found, least = seen.then(rows), torch.finfo(torch.float).min
    assert rows.see(found, mask)[0, 0].tolist() == [
        [4.0, least, 5.0, 7.0],
        [12.0, least, 13.0, 15.0],
    ]
    assert rows.see(found, mask)[1, 0, 0].tolist() == [24.0, 25.0, 26.0, least]


@pytest.mark.parametrize("family", ["Gemma3Text", "Mistral", "Cohere"])
def test_rows_of_packed_texts_are_those_of_each_alone(family: str) -> None:
    """With windows of 5 tokens, by kind of layer or in all; and logits that are scaled."""
    model = any_family(family)
    collate = DocumentCollator(0)
    with torch.no_grad():
        packed = text_rows(model, collate([examples()[:2], examples()[2:]]))
        apart = [
            model(torch.tensor([[*one.source_ids, *one.target_ids]])).logits[
                0, len(one.source_ids) - 1 : -1
            ]
            for one in examples()
        ]
    close(packed, torch.cat(apart), 1e-9)


def test_prompts_of_a_model_with_more_than_a_projection_are_refused() -> None:
    model, batch = any_family("Cohere"), DocumentCollator(0, reads_prompt=False)([examples()[:2]])
    with pytest.raises(ValueError, match="'cohere' model are more than its output"):
        text_rows(model, batch, prompts=read_prompts(model, batch, [0, 1]))
