"""Rounds read back from a file: where drafts were rejected, by hand, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafttrain.config.base import ConfigError
from drafttrain.config.language_recipes import ReplayConfig
from drafttrain.data.rounds import read_traces

FIRST = [
    {"drafted": [8, 9, 10], "accepted": 1, "emitted": [8, 11]},  # 11 came for 9
    {"drafted": [12, 13], "accepted": 2, "emitted": [12, 13, 14]},  # all accepted
    {"drafted": [], "accepted": 0, "emitted": [15]},  # nothing drafted
    {"drafted": [7], "accepted": 0, "emitted": [16]},
    {"drafted": [1, 20], "accepted": 1, "emitted": [1]},  # cut behind the end
]
SECOND = [{"drafted": [5], "accepted": 0, "emitted": [1]}]


def write(folder: Path, *lines: object) -> ReplayConfig:
    file = folder / "rounds.jsonl"
    file.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return ReplayConfig(path=file)


def refused(settings: ReplayConfig, *words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_traces(settings)
    for word in (f"replay.path = {str(settings.path)!r}", *words):
        assert word in str(error.value)


def test_a_rejection_is_where_the_target_put_its_own_token(tmp_path: Path) -> None:
    traces = read_traces(
        write(tmp_path, {"row": 4, "rounds": FIRST}, "", {"row": 0, "rounds": SECOND})
    )
    assert sorted(traces.rows) == [0, 4]
    first = traces.rows[4]
    assert first.tokens == [8, 11, 12, 13, 14, 15, 16, 1]
    assert first.rejected == [1, 6] and not first.as_pieces
    assert (traces.rows[0].rejected, traces.rows[0].line) == ([0], 3)
    assert str(traces).endswith("rounds.jsonl: 3 rejected drafts along 9 tokens of 2 rows")


def test_samples_of_eval_have_pieces_by_method(tmp_path: Path) -> None:
    pieces = [{"drafted": ["a", "5"], "accepted": 1, "emitted": ["a", "6"]}]
    none = [{"drafted": [None], "accepted": 1, "emitted": [None, "7"]}]
    outputs = {"generate": {"text": "x"}, "k=1": {"text": "x", "rounds": pieces}}
    settings = write(tmp_path, {"row": 0, "temperature": 0.0, "outputs": outputs})
    [row] = read_traces(settings).rows.values()
    assert (row.tokens, row.rejected, row.as_pieces) == (["a", "6"], [1], True)
    outputs["k=2"] = {"rounds": none}
    settings = write(tmp_path, {"row": 0, "outputs": outputs})
    refused(settings, "line 1 (row 0)", "replay.method = None", "give one of 'k=1', 'k=2'")
    settings = settings.model_copy(update={"method": "k=3"})
    refused(settings, "replay.method = 'k=3'", "give one of 'k=1', 'k=2'")
    [row] = read_traces(settings.model_copy(update={"method": "k=2"})).rows.values()
    assert (row.tokens, row.rejected, row.as_pieces) == ([None, "7"], [], True)


def test_files_that_are_not_rounds_of_greedy_decoding_are_refused(tmp_path: Path) -> None:
    refused(ReplayConfig(path=tmp_path / "none.jsonl"), "is no file", "generate --json")
    refused(write(tmp_path), "is empty", "generate --json")
    whole = {"row": 0, "rounds": SECOND}
    refused(write(tmp_path, whole, '{"row": 1, "rou'), "line 2", "EOF", "generate --json")
    refused(write(tmp_path, {"rounds": SECOND}), "line 1", "row: Field required")
    refused(write(tmp_path, {"row": -1, "rounds": SECOND}), "line 1", "row = -1")
    refused(write(tmp_path, {"row": 7, "text": "w5"}), "line 1 (row 7)", "there are no rounds")
    named = write(tmp_path, whole).model_copy(update={"method": "k=1"})
    refused(named, "(row 0)", "replay.method = 'k=1'", "leave replay.method out")
    refused(write(tmp_path, whole, whole), "row 0 is in line 1 and again in line 2")
    refused(
        write(tmp_path, whole | {"temperature": 0.7}), "(row 0)", "temperature = 0.7", "greedily"
    )
    tree = {"drafted": [5, 6], "accepted": 1, "path": [1], "emitted": [6, 1]}
    refused(write(tmp_path, {"row": 0, "rounds": [tree]}), "(row 0)", "trees", "chains")


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"drafted": [5], "accepted": 2, "emitted": [5, 6]}, "2 accepted of 1 drafted"),
        ({"drafted": [5], "accepted": 0, "emitted": [5, 6]}, "0 accepted of 1 drafted"),
        ({"drafted": [5], "accepted": 1, "emitted": [6, 7]}, "not what was emitted"),
        ({"drafted": [5], "accepted": 0, "emitted": []}, "emitted"),
        ({"drafted": [5], "accepted": 1.5, "emitted": [5]}, "accepted = 1.5"),
    ],
)
def test_rounds_that_do_not_add_up_are_refused(tmp_path: Path, broken, says: str) -> None:
    settings = write(tmp_path, {"row": 0, "rounds": [*FIRST, broken]})
    refused(settings, "line 1", "rounds.5", says)
