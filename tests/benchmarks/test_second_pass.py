"""The benchmark of a second pass over a block: what it feeds, keeps and reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import second_pass
from benchmarks.second_pass import SecondPass
from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.shared import alone
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Sampling
from drafttrain.models.spec_drafter.model import SpecDrafter
from tests.tiny_drafters import shared, tiny_drafter
from tests.tiny_targets import random_sentences, save_target, tiny_tokenizer

TOKENS = torch.tensor([0, 5, 9, 20])
CONVENTIONS = {"anchored": {"slots": "anchored"}, "paper": {"slots": "paper"}}


def excited(**settings) -> SpecDrafter:
    """Random enough for some slots to be sure of their token and others not."""
    torch.manual_seed(1)
    drafter = tiny_drafter("marian", decoder_layers=2, **settings)
    for parameter in drafter.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return drafter.double().eval()


def propose(drafter: BlockDrafter) -> list[int]:
    source = make_source(torch.tensor([5, 9, 20, 7, 1]), shared("marian"))
    session = drafter.open(source, Sampling(), SampledRandomness(torch.Generator()))
    return alone(session.propose(TOKENS, None, FixedLength(4))).tokens.tolist()


def test_slots_of_own_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="drafter.slot_weights=shared"):
        SecondPass(excited(slot_weights="own"), 0.5)


@pytest.mark.parametrize("settings", CONVENTIONS.values(), ids=CONVENTIONS.keys())
def test_second_pass_equals_one_pass_over_the_whole_block_that_is_told_the_kept_tokens(
    settings: dict,
) -> None:
    model = excited(**settings)
    first = propose(BlockDrafter(model))
    source = make_source(torch.tensor([5, 9, 20, 7, 1]), shared("marian"))
    anchored = settings["slots"] == "anchored"
    prefix = TOKENS if anchored else TOKENS[1:]  # the start token is no row of paper slots

    def block(told: list[int]) -> torch.Tensor:
        """Probabilities of the four slots, without any cache."""
        rows = torch.cat((prefix, torch.tensor(told[: 3 if anchored else 4])))
        positions = torch.arange(len(rows))
        limit = torch.where(positions < len(prefix), positions, len(rows))
        visible = (positions <= limit[:, None])[None, None]
        memory = model.encode(source.input_ids[None])
        hidden, _ = model.decode(rows[None], positions[None], visible, memory)
        return model.logits(hidden)[0, -4:].softmax(-1)

    mask = model.config.mask_id
    likelihoods = block([mask] * 4).gather(-1, torch.tensor(first)[:, None])[:, 0]
    threshold = likelihoods.sort().values[1:3].mean().item()  # two slots are kept
    kept = (likelihoods >= threshold).tolist()
    assert sum(kept) == 2
    again = block([t if keep else mask for t, keep in zip(first, kept, strict=True)])
    expected = [
        t if keep else int(row.argmax()) for t, keep, row in zip(first, kept, again, strict=True)
    ]
    if anchored:
        expected[0] = first[0]  # its row is the last committed token's, which sees no slot
    drafter = SecondPass(model, threshold)
    assert propose(drafter) == expected
    assert drafter.second_passes == 1


@pytest.mark.parametrize("threshold", [0.0, 1.1])
def test_no_second_pass_where_all_or_nothing_is_kept(threshold: float) -> None:
    model = excited(slots="anchored", previous_token_rank=3)
    drafter = SecondPass(model, threshold)
    assert propose(drafter) == propose(BlockDrafter(model))
    assert (drafter.blocks, drafter.second_passes) == (1, 0)


def test_benchmark_compares_all_ways_and_each_gives_the_targets_output(tmp_path: Path) -> None:
    target = save_target(shared("marian"), tmp_path / "target")
    drafter = tiny_drafter("marian", decoder_layers=2, slots="anchored", previous_token_rank=3)
    drafter.save_pretrained(tmp_path / "drafter")
    tiny_tokenizer().save_pretrained(tmp_path / "drafter")
    (tmp_path / "inputs.txt").write_text("\n".join(random_sentences(6)) + "\n")
    given = f"--target {target} --drafter {tmp_path}/drafter --data {tmp_path}/inputs.txt"
    given += f" --thresholds 0.01,0.5 --max-new-tokens 8 --repeats 1 --out {tmp_path}/out.json"
    second_pass.main(given.split())
    found = json.loads((tmp_path / "out.json").read_text())["methods"]
    names = ["as trained", "no previous token", "second pass, 0.01", "second pass, 0.5"]
    assert [one["name"] for one in found] == names
    assert all(one["identical"] == 1.0 for one in found)
    assert found[0]["speed_as_trained"]["value"] == 1.0
