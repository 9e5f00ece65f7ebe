"""The plan of `drafttrain tune`: candidates (decoding settings that `eval` accepts), heads and
prompts, checked before any weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from datasets import Dataset

from drafttrain.build.method import method_kind
from drafttrain.build.pairing import Drafters, check_methods
from drafttrain.build.pairs import check_pair
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import TuneConfig
from drafttrain.config.decode import DecodeConfig, StopConfig, TreeConfig, VerifierConfig
from drafttrain.config.kinds import NONE, DrafterKind, kind_of, named_kind
from drafttrain.config.methods import STOPS, TREES
from drafttrain.config.policy import POLICY
from drafttrain.config.reading import validate_settings
from drafttrain.config.runs import head_folders, head_run_of
from drafttrain.config.sweep import expand_sweep
from drafttrain.data.inputs.prompts import load_prompts
from drafttrain.data.inputs.rows import describe_inputs
from drafttrain.data.shards.store import MANIFEST
from drafttrain.data.shards.writing import check_writable
from drafttrain.evaluation.calibration import HeadFacts, judge_heads
from drafttrain.evaluation.plan import check_batches
from drafttrain.evaluation.prompts import say_training_inputs
from drafttrain.evaluation.report import check_report_file
from drafttrain.models.acceptance_head import load_heads
from drafttrain.models.drafters import read_drafter_settings

MOST = 40
"""Maximal number of candidates, including plain decoding."""
LENGTHS = {"tokens": (1, 2, 3, 4, 6, 8), "blocks": (2, 3, 4, 6, 8, 12), "copies": (2, 4, 8, 16)}
"""Fixed draft lengths by `DrafterKind.drafts`; for blocks also the trained length is tried."""
BY_ROWS = ("entropy", "confidence", "cumulative")
"""Stop policies based on the drafter's distributions; each has a threshold of the same name."""
VALUES = {
    "h": (0.3, 0.5, 0.7),
    "entropy": (1.0, 2.0),
    "confidence": (0.3, 0.5),
    "cumulative": (0.2, 0.4, 0.6),
    "nodes": (8, 16, 30),
}
"""Values tried unless `sweep` sets others."""
MOST_DRAFTED = 20
"""Maximal draft length with adaptive stop policies."""
LEVELS = 4
"""Number of levels of trees with fixed depth."""
GAIN = 0.2
"""Minimal gain in expected accepted tokens for which an opt-tree grows another level."""
MOST_ROWS, MOST_REPORTED = 512, 200
"""Maximal number of prompts for the choice and for the final measurements."""
HELD_OUT = "held_out_cache"
"""Folder in a run of heads with hidden states and labels of held-out outputs."""


@dataclass(frozen=True)
class Candidate:
    """Decoding settings and their name in the report."""

    name: str
    decode: DecodeConfig
    head: str | None = None
    """Name of the acceptance head of its stop policy; None: it uses none."""

    @property
    def is_chain(self) -> bool:
        return method_kind(self.decode) == "chain"

    @property
    def is_fixed(self) -> bool:
        """Whether it is a chain of fixed length."""
        return self.is_chain and self.decode.stop.kind == "fixed"

    def settings(self) -> dict[str, object]:
        """Returns the settings that differ between candidates, as a user would write them."""
        common = {"drafter", "sampling"}
        return self.decode.model_dump(mode="json", exclude_unset=True, exclude=common)


@dataclass(frozen=True)
class Drafting:
    """Properties of the drafter that determine the candidates."""

    kind: DrafterKind
    longest: int | None
    """Number of slots of a block drafter; None: unlimited."""
    grows_trees: bool

    @property
    def most(self) -> int:
        """Maximal draft length with adaptive stop policies."""
        return min(MOST_DRAFTED, self.longest or MOST_DRAFTED)

    @staticmethod
    def of(drafter: str) -> Drafting:
        """Reads the drafter's settings. Raises ConfigError as `read_drafter_settings` does."""
        if (named := named_kind(drafter)) is not None:
            return Drafting(named, None, grows_trees=False)
        settings = read_drafter_settings(drafter)
        kind = kind_of(settings)
        longest = settings.k if kind.drafts == "blocks" else None
        return Drafting(kind, longest, kind.tree_rows is not None)


def make_candidates(
    settings: TuneConfig, drafting: Drafting, heads: Mapping[str, Path], threshold: float | None
) -> list[Candidate]:
    """Returns all candidates except plain decoding, which is always tried too.

    heads: folders by name. threshold: h by Theorem 3.1, if known. With sampling, fixed lengths are
    tried with rejection and block verification, other stop policies only with block verification,
    which accepts at least as much of every draft (Sun et al. 2024). Raises ConfigError for more
    than MOST candidates, repeated names, and settings that no candidate uses.
    """
    found = _chains(settings, drafting, heads, threshold)
    if drafting.grows_trees:
        found += _trees(settings, drafting)
    for name, one in settings.candidates.items():
        if common := one.model_fields_set & {"drafter", "sampling"}:
            raise ConfigError(
                f"candidates.{name}.{min(common)} is given, but all candidates have the "
                f"{min(common)} of the tuning; leave it out"
            )
        parts = {field: getattr(one, field) for field in one.model_fields_set}
        found.append(Candidate(name, _decode(settings, **parts)))
    trees = {one.decode.tree.kind for one in found}
    tried = {STOPS[one.decode.stop.kind].varied for one in found}
    tried |= {"nodes"} if trees != {"none"} else set()
    unread = [f"sweep.{name}" for name, own in settings.sweep.items() if own and name not in tried]
    if "trees" in settings.model_fields_set and not trees.issuperset(settings.trees):
        unread.append("trees")
    if unread:
        raise ConfigError(
            f"{unread[0]} is given, but not tried: drafter {settings.drafter!r} cannot draft so, "
            "or not at this temperature, or heads or trees are missing; leave it out"
        )
    names = ["plain", *(one.name for one in found)]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"candidates.{repeated[0]} has the name of another candidate; give it another one"
        )
    later = len(heads) if threshold is None else 0
    if len(names) + later > MOST:
        raise ConfigError(
            f"{len(names) + later} candidates, plain decoding included, but at most {MOST} are "
            "decoded; give fewer values in sweep, or trees=[]"
        )
    return found


def _chains(
    settings: TuneConfig, drafting: Drafting, heads: Mapping[str, Path], threshold: float | None
) -> list[Candidate]:
    """Returns chains of fixed length, and with stop policies based on distributions or heads."""
    sampled, values = _is_sampled(settings), VALUES | settings.sweep
    longest, lengths = drafting.longest, LENGTHS[drafting.kind.drafts]
    if longest is not None:
        lengths = sorted({*(k for k in lengths if k <= longest), longest})
    sweep = {"k": values.get("k") or lengths}
    for stop in map(STOPS.__getitem__, BY_ROWS):
        if stop.requires <= drafting.kind.provides and not (sampled and stop.greedy_only):
            sweep[stop.name] = values[stop.name]
    bounded = {"max_draft": drafting.most}
    found = []
    for one in expand_sweep(_decode(settings, stop=StopConfig(**bounded)), sweep):
        stop = STOPS[one.stop.kind]
        found.append(Candidate(stop.named(getattr(one.stop, stop.varied)), one))
    thresholds = {*values["h"]}
    if threshold is not None:
        thresholds.add(min(max(round(threshold, 3), 0.001), 0.999))  # h excludes 0 and 1
    for head, folder in heads.items():
        decode = _decode(settings, stop=StopConfig(head=str(folder), **bounded))
        swept = expand_sweep(decode, {"h": sorted(thresholds)}) if thresholds else ()
        found += [Candidate(f"{head} h={one.stop.h:g}", one, head) for one in swept]
    if not sampled:
        return found
    block = {"verifier": VerifierConfig(kind="block")}
    return [one for one in found if one.is_fixed] + [
        replace(one, name=f"{one.name} block", decode=one.decode.model_copy(update=block))
        for one in found
        if one.decode.stop.k > 1  # for one token both verifiers are the same
    ]


def _trees(settings: TuneConfig, drafting: Drafting) -> list[Candidate]:
    """Returns trees with each number of draft tokens, or one tree of a kind without a size."""
    nodes = (VALUES | settings.sweep)["nodes"]
    levels, found = min(LEVELS, drafting.longest or LEVELS), []
    for kind in map(TREES.__getitem__, settings.trees):
        if kind.shape is None or (kind.drawn and not _is_sampled(settings)):
            continue
        parts = {"stop": StopConfig(k=levels)}
        if "expected" in kind.provides:
            parts = {"stop": StopConfig(kind="gain", delta=GAIN, max_draft=drafting.most)}
        if "nodes" in kind.settings:
            sizes = {f"{kind.name}({size:g})": {"nodes": size} for size in nodes}
        elif "width" in kind.settings:
            widths = [max(2, int(size) // levels) for size in nodes]
            sizes = {f"{kind.name}({width}x{levels})": {"width": width} for width in widths}
        else:
            sizes, parts = {kind.name: {}}, {}
        for name, size in sizes.items():
            tree = validate_settings(TreeConfig, {"kind": kind.name, **size}, within="tree")
            found.append(Candidate(name, _decode(settings, tree=tree, **parts)))
    return found


def _is_sampled(settings: TuneConfig) -> bool:
    return settings.sampling is not None and settings.sampling.temperature > 0


def _decode(settings: TuneConfig, **parts: object) -> DecodeConfig:
    return DecodeConfig(drafter=settings.drafter, sampling=settings.sampling, **parts)


@dataclass(frozen=True)
class TunePlan:
    """Checked candidates, heads and prompts, and the drafters to load."""

    settings: TuneConfig
    drafting: Drafting
    heads: dict[str, Path]
    """Folders of the heads to try, by name."""
    judged: list[HeadFacts]
    """Calibration of all heads, best first; empty without held-out rows."""
    candidates: list[Candidate]
    """Without those of Theorem 3.1, whose threshold is known only after calls are timed."""
    drafters: Drafters
    """The drafters of the candidates."""
    rows: Dataset
    """Rows for the choice."""
    reported: Dataset
    """Rows for the final measurements."""

    def lines(self) -> list[str]:
        """Returns the lines that a dry run prints."""
        settings, names = self.settings, ", ".join(one.name for one in self.candidates)
        reported = (settings.report_data or settings.data).path
        return [
            f"candidates   {1 + len(self.candidates)}: plain, {names}",
            f"prompts      {len(self.rows)} of {settings.data.path} to choose on, at most; "
            f"{len(self.reported)} of {reported} for the final figures",
            f"inputs       {describe_inputs(self.rows)}",
            f"batch sizes  {', '.join(map(str, settings.batch_sizes))}",
            f"minutes      {settings.minutes:g} at most",
            f"report       {settings.report}",
        ]


def policy_file(settings: TuneConfig) -> Path:
    """Returns the file for the policy. With `write` it is where other commands find it, next to the
    heads or in the drafter's folder; otherwise next to the report. Raises ConfigError if the
    drafter is no folder or the file cannot be written."""
    folder = Path(str(settings.drafter))
    if not settings.write:
        file = settings.report.with_suffix(f".{POLICY}")
    elif settings.heads is not None:
        file = head_folders(settings.heads)[0].parent / POLICY
    elif not folder.is_dir():
        raise ConfigError(
            f"write: drafter = {str(folder)!r} is no folder here that could hold a policy.json; "
            "leave it out, and give --policy FILE to the commands that are to use the policy"
        )
    else:
        file = folder / POLICY
    check_writable(file.parent, f"policy = {str(file)!r}")
    return file


def make_plan(settings: TuneConfig) -> TunePlan:
    """Checks everything except the weights. Raises ValueError for incompatible settings."""
    check_report_file(settings.report)
    policy_file(settings)
    drafting = Drafting.of(str(settings.drafter))
    if drafting.kind is NONE:
        raise ConfigError("drafter = 'none' drafts nothing, so there is nothing to tune; give one")
    judged, heads = choose_heads(settings)
    candidates = make_candidates(settings, drafting, heads, None)
    drafters = check_methods(*(one.decode for one in candidates))
    check_pair(settings.target, *drafters)
    plan = TunePlan(settings, drafting, heads, judged, candidates, drafters, *split_rows(settings))
    for rows in (plan.rows, plan.reported):
        check_batches(settings.batch_sizes, len(rows))
    say_training_inputs(str(settings.drafter), plan.reported)
    return plan


def choose_heads(settings: TuneConfig) -> tuple[list[HeadFacts], dict[str, Path]]:
    """Evaluates the heads on the held-out cache of their run and returns their calibration and the
    folders of those to try: the best by binary KL, and the best of those with the fewest blocks,
    because a head's own time counts. Without a cache: the first two by name."""
    if settings.heads is None:
        return [], {}
    path = Path(str(settings.heads))
    folders = {name: folder for folder in head_folders(path) for name in load_heads(folder)}
    run, judged = head_run_of(path), []
    if run is not None and (run.folder / HELD_OUT / MANIFEST).is_file():
        judged = judge_heads(load_heads(path), run.folder / HELD_OUT)
    names = sorted(folders)[:2]
    if judged:
        shallowest = min(judged, key=lambda one: one.depth)  # the first has the best KL
        names = list(dict.fromkeys((judged[0].name, shallowest.name)))
    return judged, {name: folders[name] for name in names}


def split_rows(settings: TuneConfig) -> tuple[Dataset, Dataset]:
    """Returns shuffled rows for the choice and for the final measurements; without report_data the
    latter are a third of the data. Raises ConfigError for fewer than 3 rows."""
    rows = load_prompts(settings.data, settings.target).shuffle(0, keep_in_memory=True)
    count = len(rows)
    if settings.report_data is not None:
        reported = load_prompts(settings.report_data, settings.target, "report_data")
        reported = reported.shuffle(0, keep_in_memory=True)
    elif count < 3:
        raise ConfigError(
            f"data.path = {settings.data.path!r} holds {count} prompts; give 3 at least (a "
            "third is split off for the final figures), or report_data"
        )
    else:
        count -= count // 3
        reported = rows.select(range(count, len(rows)))
    return first(rows, min(count, MOST_ROWS)), first(reported, MOST_REPORTED)


def first(rows: Dataset, most: int) -> Dataset:
    return rows.select(range(min(most, len(rows))))
