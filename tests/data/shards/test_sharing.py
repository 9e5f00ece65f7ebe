"""Launches that share a folder and nothing else write what one launch writes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import DistillConfig
from drafttrain.data.distill.distill import distill
from drafttrain.data.shards.outputs import Manifest, load_distilled
from drafttrain.data.shards.store import read_share
from drafttrain.data.shards.writing import only_writer
from tests.data.distill.tiny_distill import SAMPLED, settings


def sampled(target: Path, out: str, share: str | None = None) -> DistillConfig:
    return settings(target, out, 30, shard_rows=6, share=share, **SAMPLED)


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("shard-*.parquet")}


def distil_alone(config: DistillConfig) -> None:
    torch.set_num_threads(1)
    distill(config)


def test_two_launches_at_once_write_what_one_writes(tiny_target: Path) -> None:
    whole = sampled(tiny_target, "whole")
    manifest = distill(whole)
    launches = [
        multiprocessing.get_context("fork").Process(
            target=distil_alone, args=(sampled(tiny_target, "shared", f"{index}/2"),)
        )
        for index in range(2)
    ]
    for launch in launches:
        launch.start()
    for launch in launches:
        launch.join(300)
        assert launch.exitcode == 0
    shared = tiny_target.parent / "shared"
    assert shards(shared) == shards(whole.out) and len(shards(shared)) == 5
    assert Manifest.read(shared).counts == manifest.counts
    assert load_distilled(shared)[:] == load_distilled(whole.out)[:]


def test_the_launch_that_ends_last_completes_the_manifest(
    tiny_target: Path, capsys: pytest.CaptureFixture
) -> None:
    first, second = (sampled(tiny_target, "out", share) for share in ("0/2", "1/2"))
    assert distill(first).counts is None
    assert "2 of 5 shards are still missing" in capsys.readouterr().err
    assert set(shards(first.out)) == {f"shard-0000{i}.parquet" for i in (0, 2, 4)}
    with pytest.raises(ConfigError, match="3 of 5 shards are there"):
        load_distilled(first.out)
    assert distill(second).counts.ok == 30


def test_a_share_has_one_launch_at_a_time_which_clears_up_after_itself_only(
    tiny_target: Path,
) -> None:
    config = sampled(tiny_target, "out", "0/2")
    distill(config)
    (config.out / "shard-00002.parquet").unlink()
    own, other = (config.out / f".shard-0000{i}.parquet-there-1.part" for i in (2, 1))
    own.touch()
    other.touch()
    lock = only_writer(config.out, name=read_share("0/2").lock)
    with lock, pytest.raises(ConfigError, match="another process is writing"):
        distill(config)
    lock.release()
    distill(config)
    assert other.exists() and not own.exists()


@pytest.mark.parametrize("share", ["2/2", "1", "0/0", "-1/2", "a/b", "1/2/3"])
def test_a_share_that_is_none_is_refused(share: str) -> None:
    with pytest.raises(ConfigError, match=f"share = '{share}'"):
        read_share(share)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_are_a_partition(count: int) -> None:
    parts = [read_share(f"{index}/{count}").of(range(10)) for index in range(count)]
    assert sorted(sum(parts, [])) == list(range(10))
