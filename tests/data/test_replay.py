"""Which tokens a trace makes weigh more, how much, and traces of other outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from drafttrain.config.base import ConfigError
from drafttrain.config.language_recipes import CausalDrafterRecipe
from drafttrain.data.batches.examples import Examples
from drafttrain.data.replay import (
    RECORD,
    WeighedExamples,
    check_replay,
    find_rejections,
    replayed_examples,
)
from drafttrain.data.rounds import read_traces
from tests.comparing import close
from tests.tiny_targets import tiny_tokenizer

ROWS = [(3, [5, 6], [8, 9, 10, 1]), (5, [7], [11, 1]), (9, [4], [12, 13, 14, 15])]
"""Number, prompt and output of distilled rows; the last was cut at its 4 tokens."""
TRACED = {
    3: [([8, 7], 1, [8, 9]), ([20], 0, [10]), ([1], 1, [1])],  # 9 and 10 rejected
    9: [([5], 0, [12]), ([5], 0, [13]), ([5], 0, [20]), ([5], 0, [15])],  # 20: rounding
    40: [([5], 0, [8])],  # not distilled
}


def distilled() -> datasets.Dataset:
    names = ("row", "source_ids", "target_ids")
    return datasets.Dataset.from_dict(dict(zip(names, zip(*ROWS, strict=True), strict=True)))


def write(folder: Path, traced: dict[int, list] = TRACED, pieces: bool = False) -> None:
    def spelled(tokens: list[int]) -> list:
        return tiny_tokenizer().convert_ids_to_tokens(tokens) if pieces else tokens

    lines = [
        {
            "row": row,
            "rounds": [
                {"drafted": spelled(drafted), "accepted": accepted, "emitted": spelled(emitted)}
                for drafted, accepted, emitted in rounds
            ],
        }
        for row, rounds in traced.items()
    ]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def recipe(folder: Path, **changes: Any) -> CausalDrafterRecipe:
    values = {
        "run": folder / "run",
        "target": {"path": "target"},
        "data": {"path": "texts.txt"},
        "replay": {"path": folder / "rounds.jsonl", "share": 0.75},
    }
    return CausalDrafterRecipe.model_validate(values | changes)


def found_in(folder: Path, draftable: torch.Tensor | None = None, **changes: Any):
    settings = recipe(folder, **changes)
    traces = read_traces(settings.replay)
    return find_rejections(settings, traces, distilled(), tiny_tokenizer(), draftable)


@pytest.mark.parametrize("pieces", [False, True], ids=["ids", "pieces"])
def test_rejections_on_the_target_s_own_outputs_count_until_a_trace_leaves_them(
    tmp_path: Path, pieces: bool
) -> None:
    write(tmp_path, pieces=pieces)
    found = found_in(tmp_path)
    assert found.places == {0: [1, 2], 2: [0, 1]}
    assert (found.rows, found.tokens, found.count) == (2, 10, 4)
    assert found.weight == 1 + 3 * 10 / 4


def test_the_rejected_tokens_have_the_stated_share_of_the_loss(tmp_path: Path) -> None:
    write(tmp_path)
    found = found_in(tmp_path)
    losses = [torch.rand(len(output), dtype=torch.float64) for _, _, output in ROWS]
    weights = [found.weights(row, len(output)) for row, (_, _, output) in enumerate(ROWS)]
    assert weights[1].tolist() == [1.0, 1.0] and weights[0].tolist() == [1.0, 8.5, 8.5, 1.0]
    every, own = torch.cat(losses), torch.cat(weights).double()
    rejected = torch.cat([losses[0][1:3], losses[2][:2]])
    close((own * every).sum() / own.sum(), 0.25 * every.mean() + 0.75 * rejected.mean())


def test_tokens_that_cannot_be_drafted_and_those_that_the_target_tells_are_not_replayed(
    tmp_path: Path,
) -> None:
    write(tmp_path)
    assert found_in(tmp_path, torch.tensor([1, 9, 12])).places == {0: [1], 2: [0]}
    behind = found_in(tmp_path, drafter={"prompt": "target"})
    assert behind.places == {0: [1, 2], 2: [1]} and behind.tokens == 7


def test_examples_have_the_weights_in_every_epoch_and_order(tmp_path: Path) -> None:
    write(tmp_path)
    found = found_in(tmp_path)
    examples = WeighedExamples(Examples(distilled()), found)
    assert len(examples) == 3
    one, two, three = examples.__getitems__([(0, 2), (5, 0), (1, 1)])
    assert one.weights.tolist() == [8.5, 8.5, 1.0, 1.0] and one.target_ids == ROWS[2][2]
    assert two.weights.tolist() == [1.0, 8.5, 8.5, 1.0] and two.epoch == 5
    assert three.weights.tolist() == [1.0, 1.0]


def test_a_run_records_what_it_replays_and_refuses_another_file(tmp_path: Path, capsys) -> None:
    settings = recipe(tmp_path)
    settings.run.mkdir()
    write(tmp_path)
    asked = (settings, Examples(distilled()), distilled(), tiny_tokenizer(), None)
    assert isinstance(replayed_examples(*asked), WeighedExamples)
    assert (
        "2 rows traced, 4 of 10 learned tokens rejected; each weighs 8.5" in capsys.readouterr().err
    )
    record = json.loads((settings.run / RECORD).read_text())
    assert (record["rejected"], record["weight"]) == (4, 8.5)
    check_replay(settings)
    write(tmp_path, {3: TRACED[3]})
    with pytest.raises(ConfigError, match=r"is not what it was .*run=ANOTHER_FOLDER"):
        check_replay(settings)


def test_without_a_trace_examples_are_as_they_were(tmp_path: Path) -> None:
    examples = Examples(distilled())
    off = recipe(tmp_path, replay={})
    assert check_replay(off) is None
    assert replayed_examples(off, examples, distilled(), tiny_tokenizer(), None) is examples


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"replay": {"share": 0.3}}, r"replay\.share = 0\.3.* give replay\.path"),
        ({"distill": {"method": "sample"}}, r"distill\.method = 'sample'.*method=greedy"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path: Path, changes, says) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=says):
        check_replay(recipe(tmp_path, **changes))


@pytest.mark.parametrize(
    ("traced", "says"),
    [
        ({40: TRACED[40]}, r"none of the 3 distilled rows, but row 40 .*prompts of `data`"),
        (
            {3: [([5], 0, [7]), ([5], 0, [9])], 5: [([5], 0, [11])]},
            r"of 3 tokens 1 are .* row 3 \(line 1\), whose token 0 is 7 there and 8 of the target",
        ),
        ({3: [([8], 1, [8, 9])]}, r"none of its 0 rejections .*trace more rows"),
    ],
    ids=["other rows", "another target", "nothing rejected"],
)
def test_traces_of_other_outputs_are_refused(tmp_path: Path, traced, says: str) -> None:
    write(tmp_path, traced)
    with pytest.raises(ConfigError, match=says):
        found_in(tmp_path)
