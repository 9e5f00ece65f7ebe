"""The processes of a launch write the shards that a folder lacks; one completes the manifest."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from accelerate import PartialState
from tqdm import tqdm

from drafttrain.config.base import Interrupted
from drafttrain.config.progress import tracking
from drafttrain.data.shards.sharing import Share
from drafttrain.data.shards.store import (
    M,
    begin_folder,
    is_finished,
    missing_shards,
    read_manifest,
    write_manifest,
)
from drafttrain.data.shards.writing import only_writer, say


class Filling(Protocol[M]):
    """What the shards of a folder are made by."""

    kind: type[M]
    plan: str
    """Printed before the first shard is made, if there is something to say."""

    def describe(self) -> M:
        """The manifest of a folder that is begun now. Asked for on the main process, once it is
        known that no other launch writes."""

    def write(self, manifest: M, shard: int, work: tqdm) -> None:
        """Make and write the shard of this number, and report its rows as they are done."""

    def complete(self, manifest: M) -> M:
        """The manifest with its account, once every shard is there."""

    def report(self, manifest: M) -> None:
        """Print the account of a finished folder."""


def fill_folder(filling: Filling[M], folder: Path, share: Share, state: PartialState) -> M:
    """Write the share's missing shards and return the manifest, finished where all are there.

    Shards are shared out among the processes by number, so that what is written does not depend on
    how many there are; a finished folder may be asked for by several launches at once. Raises
    ConfigError, before anything is written, for a folder that was begun with other settings, and
    Interrupted on the main process.
    """
    done = is_finished(filling.kind, folder)
    with ExitStack() as stack:
        if state.is_main_process:
            if not done:
                stack.enter_context(only_writer(folder, filling.kind.SETTING, share.lock))
            begin_folder(folder, filling.describe(), share)
            if filling.plan:
                say(filling.plan)
        state.wait_for_everyone()
        manifest = read_manifest(filling.kind, folder)
        missing = share.of(missing_shards(folder, manifest))
        state.wait_for_everyone()  # all have listed before anyone writes
        mine = missing[state.process_index :: state.num_processes]
        rows = sum(len(manifest.rows_of(shard)) for shard in mine)
        try:
            with tracking(rows, manifest.VERB, "row", shown=state.is_main_process) as work:
                for shard in mine:
                    filling.write(manifest, shard, work)
            state.wait_for_everyone()
        except KeyboardInterrupt:
            if state.is_main_process:
                there = manifest.shards - len(missing_shards(folder, manifest))
                raise Interrupted(
                    f"interrupted: {there} of {manifest.shards} shards are in {folder}; run "
                    "the same command again to continue"
                ) from None
            raise
        if state.is_main_process and done:
            filling.report(manifest)
        elif state.is_main_process:
            _complete(filling, folder, manifest)
        state.wait_for_everyone()
    return read_manifest(filling.kind, folder)


def _complete(filling: Filling[M], folder: Path, manifest: M) -> None:
    """Completes the manifest, if no other share's shards are missing."""
    if missing := missing_shards(folder, manifest):
        say(
            f"{folder}: this share is done; {len(missing)} of {manifest.shards} shards are still "
            "missing; the launch of the share that ends last completes the manifest"
        )
        return
    finished = filling.complete(manifest)
    write_manifest(folder, finished)
    filling.report(finished)
