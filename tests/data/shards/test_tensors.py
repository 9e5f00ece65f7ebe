"""Ragged rows in shards are read as written, and invalid files are named."""

from pathlib import Path

import pytest
import torch

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import CacheConfig
from drafttrain.data.hidden.states import CacheManifest
from drafttrain.data.shards.store import check_same_settings, open_tensors, write_tensors
from drafttrain.data.teacher import TeacherManifest

ROWS = [torch.arange(3 * i, 3 * i + n) for i, n in enumerate([2, 0, 3, 1, 2])]
WIDTHS = {"number": (), "pair": (2,)}
MANIFEST = TeacherManifest.model_construct(rows=5, shard_rows=2)


def write(folder: Path) -> None:
    """Writes the five rows to three shards, as group `b.` next to another group."""
    for shard in range(3):
        own = [ROWS[row] for row in MANIFEST.rows_of(shard)]
        numbers = torch.cat(own)
        tensors = {
            "a.lengths": torch.zeros(1),
            "b.lengths": torch.tensor([len(row) for row in own]),
            "b.number": numbers,
            "b.pair": torch.stack([numbers, -numbers], 1).half(),
        }
        write_tensors(MANIFEST.path(folder, shard), tensors)


def opened(folder: Path):
    return open_tensors(folder, MANIFEST, WIDTHS, "b.")


@pytest.mark.parametrize("rows", [[0], [3, 4], [4, 2, 1, 0], [0, 1, 2, 3, 4], [1], [], [2, 2]])
def test_rows_come_in_the_requested_order(tmp_path, rows):
    write(tmp_path)
    numbers, pairs = opened(tmp_path).read(rows, "number", "pair")
    expected = torch.cat([ROWS[0][:0], *(ROWS[row] for row in rows)])
    assert torch.equal(numbers, expected)
    assert torch.equal(pairs, torch.stack([expected, -expected], 1).half())
    assert opened(tmp_path).lengths.tolist() == [2, 0, 3, 1, 2]
    assert torch.equal(
        torch.cat([shard["number"] for shard in opened(tmp_path).shards]), torch.cat(ROWS)
    )


def test_a_damaged_shard_and_one_of_another_folder_are_named(tmp_path):
    write(tmp_path)
    first, last = MANIFEST.path(tmp_path, 0), MANIFEST.path(tmp_path, 2)
    content = first.read_bytes()
    damaged = "shard-00000.safetensors cannot be read"
    other = "holds 1 rows .* where 2 rows"
    for wrong, text in ((content[:-1], damaged), (b"", damaged), (last.read_bytes(), other)):
        first.write_bytes(wrong)
        with pytest.raises(ConfigError, match=f"{text}.*delete it and run the same command again"):
            opened(tmp_path)
    first.write_bytes(content)
    with pytest.raises(ConfigError, match=r"'pair': \[2, 3\]"):
        open_tensors(tmp_path, MANIFEST, WIDTHS | {"pair": (3,)}, "b.")


def test_a_cause_is_named_before_its_effects(tmp_path):
    token, drawn = (CacheConfig.model_construct(state=state) for state in ("token", "drawn"))
    there = CacheManifest.model_construct(settings=token, hidden_size=128, rows=3)
    wanted = there.model_copy(update={"settings": drawn, "hidden_size": 134})
    with pytest.raises(ConfigError, match="state = 'token', but the settings now say 'drawn'"):
        check_same_settings(tmp_path, there, wanted)
