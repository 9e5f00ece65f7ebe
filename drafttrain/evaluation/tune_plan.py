"""The plan of `drafttrain tune`: candidates, heads and prompts, checked before weights load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset

from drafttrain.build.cascades import other_drafters
from drafttrain.build.method import check_method
from drafttrain.build.pairs import Pair, check_pair, load_pair
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import TuneConfig
from drafttrain.config.kinds import NONE
from drafttrain.config.runs import head_folders, head_run_of
from drafttrain.config.trees import TREES
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.shards.store import MANIFEST
from drafttrain.evaluation.calibration import HeadFacts, judge_heads
from drafttrain.evaluation.candidates import Candidate, Drafting, check_trees, make_candidates
from drafttrain.evaluation.report import check_new_file
from drafttrain.models.acceptance_head import load_heads
from drafttrain.models.loading import check_target
from drafttrain.models.speech import hears

MOST_ROWS, MOST_REPORTED = 512, 200
"""Prompts to choose on and for the final figures, at most."""
MOST_HEADS = 2
"""Heads that are tried, the best by held-out KL."""
HELD_OUT = "held_out_cache"
"""Folder of a run of heads with states and labels of held-out outputs."""


@dataclass(frozen=True)
class TunePlan:
    """What will be decoded."""

    settings: TuneConfig
    drafting: Drafting
    heads: dict[str, Path]
    """Folders of the heads that are tried, by name."""
    judged: list[HeadFacts]
    """Calibration of all heads, the best first; empty without held-out rows."""
    candidates: list[Candidate]
    """Without those by Theorem 3.1, whose threshold is known once calls are timed."""
    rows: Dataset
    """To choose on."""
    reported: Dataset
    """For the final figures."""

    @property
    def reported_path(self) -> str:
        return str((self.settings.report_data or self.settings.data).path)

    @property
    def batch_sizes(self) -> list[int]:
        """In rising order; 1 is always among them."""
        return sorted({1, *self.settings.batch_sizes})

    def load_pair(self) -> Pair:
        settings = self.settings
        beside, trees, table = drafters_beside(settings, self.candidates)
        return load_pair(settings.target, str(settings.drafter), beside, trees, table)

    def lines(self) -> list[str]:
        """What would be decoded, a line each."""
        settings, names = self.settings, ", ".join(one.name for one in self.candidates)
        return [
            f"candidates   {1 + len(self.candidates)}: plain, {names}",
            f"prompts      {len(self.rows)} of {settings.data.path} to choose on, at most; "
            f"{len(self.reported)} of {self.reported_path} for the final figures",
            f"batch sizes  {', '.join(map(str, self.batch_sizes))}",
            f"minutes      {settings.minutes:g} at most",
            f"report       {settings.report}",
        ]


def make_plan(settings: TuneConfig) -> TunePlan:
    """Check everything but the weights. Raises ValueError for settings that do not go together."""
    check_new_file(settings.report, "report", (".json",))
    check_trees(settings.trees)
    drafting = Drafting.of(str(settings.drafter))
    if drafting.kind is NONE:
        raise ConfigError("drafter = 'none' drafts nothing, so there is nothing to tune; give one")
    judged, heads = choose_heads(settings)
    candidates = make_candidates(settings, drafting, heads, None)
    for one in candidates:
        check_method(one.decode)
    beside, trees, table = drafters_beside(settings, candidates)
    check_pair(settings.target, (str(settings.drafter), *beside), trees, table)
    plan = TunePlan(settings, drafting, heads, judged, candidates, *split_rows(settings))
    fewest, largest = min(len(plan.rows), len(plan.reported)), plan.batch_sizes[-1]
    if largest > fewest:
        raise ConfigError(
            f"batch_sizes = {largest}, but there are only {fewest} prompts to choose on or for the "
            "final figures, so that no batch would be full; give more prompts, or smaller batches"
        )
    return plan


def choose_heads(settings: TuneConfig) -> tuple[list[HeadFacts], dict[str, Path]]:
    """Calibration of the heads on the held-out cache of their run, and the folders of those that
    are tried: the best by binary KL, or those with the fewest layers where there is no cache."""
    if settings.heads is None:
        return [], {}
    place = Path(str(settings.heads))
    found = {name: folder for folder in head_folders(place) for name in load_heads(folder)}
    run, judged = head_run_of(place), []
    if run is not None and (run.folder / HELD_OUT / MANIFEST).is_file():
        judged = judge_heads(load_heads(place), run.folder / HELD_OUT)
    names = [one.name for one in judged] or sorted(found)
    return judged, {name: found[name] for name in names[:MOST_HEADS]}


def drafters_beside(
    settings: TuneConfig, candidates: list[Candidate]
) -> tuple[list[str], bool, str | None]:
    """Drafters that have a part in some candidate beside the first one; whether the user gives
    candidates with trees; the table of max-gram. Raises ConfigError for several tables."""
    decodes = [one.decode for one in candidates]
    beside = sorted({name for decode in decodes for name in other_drafters(decode)})
    trees = any(TREES[one.tree.kind].shape is not None for one in settings.candidates.values())
    tables = sorted({decode.bigrams for decode in decodes if decode.bigrams is not None})
    if len(tables) > 1:
        raise ConfigError(f"bigrams = {tables}; give all candidates one table, or none")
    return beside, trees, next(iter(tables), None)


def split_rows(settings: TuneConfig) -> tuple[Dataset, Dataset]:
    """Rows to choose on and rows to report on, shuffled; without report_data a third of data is
    split off. Raises ConfigError where there are too few."""
    heard = hears(check_target(settings.target))
    rows = shuffled(load_inputs(settings.data, "data", heard))
    if settings.report_data is not None:
        reported = shuffled(load_inputs(settings.report_data, "report_data", heard))
        return first(rows, MOST_ROWS), first(reported, MOST_REPORTED)
    if len(rows) < 3:
        raise ConfigError(
            f"data.path = {settings.data.path!r} holds {len(rows)} prompts; give 3 at least (a "
            "third is split off for the final figures), or report_data"
        )
    own = len(rows) - len(rows) // 3
    chosen, reported = rows.select(range(own)), rows.select(range(own, len(rows)))
    return first(chosen, MOST_ROWS), first(reported, MOST_REPORTED)


def shuffled(rows: Dataset) -> Dataset:
    return rows.select(np.random.default_rng(0).permutation(len(rows)).tolist())


def first(rows: Dataset, most: int) -> Dataset:
    return rows.select(range(min(most, len(rows))))
