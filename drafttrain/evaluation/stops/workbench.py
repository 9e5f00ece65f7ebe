"""What tuning works on: settings, pair, heads and prompts, checked before weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from drafttrain.build.cascades import level_names
from drafttrain.build.method import Method, build_method, build_sampling, check_method
from drafttrain.build.pairs import Pair, load_pair
from drafttrain.build.verifiers import AUTO, build_verifier
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import TuneConfig
from drafttrain.config.decode import CascadeConfig, DecodeConfig, SamplingConfig, VerifierConfig
from drafttrain.config.kinds import kind_of, named_kind
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import own_source
from drafttrain.decoding.stopping import FixedLength, HeadPolicy, make_policy
from drafttrain.decoding.types import Source
from drafttrain.evaluation.bootstrap import Array
from drafttrain.evaluation.played.candidates import Played, cascades_of, trees_of
from drafttrain.evaluation.prompts import PromptSet, load_both, read_both
from drafttrain.evaluation.report import check_new_file
from drafttrain.evaluation.stops.block_trace import block_limits
from drafttrain.evaluation.stops.chain_trace import TraceOptions, check_traceable, draft_limits
from drafttrain.evaluation.stops.decoded import Drafting
from drafttrain.evaluation.stops.replay import OF_ROWS, Candidate, VerifierOfChains
from drafttrain.models.acceptance_head import (
    AcceptanceHead,
    check_head_identity,
    check_head_shape,
    load_heads,
)
from drafttrain.models.draft_states import StateKind
from drafttrain.models.drafters import read_drafter_settings, read_kind

NEEDS_RANKS = (
    "it is built from acceptance by rank, which `drafttrain eval` measures (rank_data); give "
    "opt-tree, which goes by the drafter's own rows"
)


@dataclass(frozen=True)
class Workbench:
    """What tuning works on, loaded and checked."""

    settings: TuneConfig
    pair: Pair
    target: CachedModel
    heads: dict[str, AcceptanceHead]
    choosing: PromptSet
    """Prompts to choose on."""
    reporting: PromptSet | None
    """Prompts that choose nothing."""
    played: list[Played] = field(default_factory=list)
    """Trees and cascades to try."""

    @property
    def drafters(self) -> list[str]:
        """Names that the calls of a cascade's drafters are counted under."""
        cascade = CascadeConfig(drafters=self.settings.cascade or ("none",))
        return level_names(str(self.settings.drafter), cascade) if self.settings.cascade else []

    @property
    def sampling(self) -> SamplingConfig:
        return self.settings.sampling

    @property
    def depths(self) -> dict[str, int]:
        """Layers of each head."""
        return {name: head.config.depth for name, head in self.heads.items()}

    @property
    def block(self) -> bool:
        """Whether one pass drafts a block."""
        return self.pair.kind is not None and self.pair.kind.drafts == "blocks"

    @property
    def drafting(self) -> Drafting:
        """How the pair drafts."""
        if self.block:
            return Drafting(block=True, lag=0, ends=frozenset())
        lag = 1 if self.state_kind == "token" else 0
        return Drafting(block=False, lag=lag, ends=self.pair.drafter.eos_ids)

    def limits(self, source: Source, length: int) -> Array:
        """Most tokens that may be drafted from each position of an output. [L]."""
        drafter, options = self.pair.drafter, self.trace_options()
        if self.block:
            return block_limits(self.target, drafter, source, length, options)
        prefix = len(own_source(source, drafter.model.model).prefix)
        positions = drafter.model.position_limit
        return draft_limits(self.target, positions, source, prefix, length, options)

    @property
    def verifiers(self) -> tuple[VerifierOfChains, ...]:
        """The rules asked for that can be replayed; in greedy decoding there is one."""
        if self.sampling.temperature == 0:
            return ("rejection",)
        return tuple(one for one in self.settings.verifiers if one != "block" or self.weighs)

    @property
    def left_out(self) -> list[str]:
        """What is asked for and fits the sampling but cannot be tried, a line each."""
        lines = []
        if self.sampling.temperature > 0:
            lines = [
                f"{name} verification cannot be replayed for this pair, and is left out"
                for name in sorted(set(self.settings.verifiers) - set(self.verifiers))
            ]
        if self.settings.trees and not takes_trees(self.target, self.pair):
            lines.append("trees cannot be given to this pair, and are left out")
        return lines

    @property
    def batch_sizes(self) -> list[int]:
        """In rising order; 1, which tables and plots are of, is always among them."""
        return sorted({1, *self.settings.batch_sizes})

    @property
    def weighs(self) -> bool:
        """Whether block verification can be replayed: rejected drafts of one token a call are gone
        on with beside the target's cached output, which logits processors do not look at."""
        processors = self.target.processors(build_sampling(self.sampling))
        beside = self.target.takes_branches and not processors.change_logits
        return self.block or (beside and self.pair.drafter.model.takes_branches)

    def replays(self, candidate: Candidate) -> bool:
        """Whether the trace of its rule shows the policy what decoding would: of rows and states
        behind rejected slots of a block only rejection's are known, where they depend on the tokens
        drafted.
        """
        if candidate.verifier == "rejection" or not self.block:
            return True
        drafter = self.pair.drafter
        if candidate.kind in OF_ROWS:
            return not (drafter.linked or drafter.feeds_first)
        return candidate.kind == "fixed" or not drafter.feeds_first

    def method(self, k: int, state_kind: StateKind | None = None) -> Method:
        """Fixed length k, which shows states of a kind if asked to."""
        verifier = build_verifier(AUTO, build_sampling(self.sampling))
        return Method(self.pair.drafter, FixedLength(k, state_kind), verifier)

    def triple(self, candidate: Candidate | Played) -> Method:
        """What decodes as a candidate says."""
        if isinstance(candidate, Played):
            return replace(build_method(candidate.decode, self.pair), label=candidate.name)
        if candidate.kind == "fixed":
            stop = FixedLength(int(candidate.value))
        elif candidate.head is not None:
            stop = HeadPolicy(self.heads[candidate.head], candidate.value, candidate.max_draft)
        else:
            stop = make_policy(candidate.kind, candidate.value, candidate.max_draft)
        rule = (
            AUTO if candidate.verifier == "rejection" else VerifierConfig(kind=candidate.verifier)
        )
        verifier = build_verifier(rule, build_sampling(self.sampling))
        return Method(self.pair.drafter, stop, verifier, label=candidate.name)

    def trace_options(self) -> TraceOptions:
        settings = self.settings
        return TraceOptions(
            sampling=build_sampling(self.sampling),
            max_new_tokens=self.sampling.max_new_tokens,
            depth=max(settings.max_draft, *settings.lengths),
            replicates=settings.replicates,
            state_kind=self.state_kind,
        )

    @property
    def state_kind(self) -> StateKind:
        """The kind of states that the heads read; without heads nothing reads any."""
        return next((head.config.state for head in self.heads.values()), "drawn")


def within_block(settings: TuneConfig) -> TuneConfig:
    """Drafts no longer than the block that a drafter was trained for, where nothing else is asked.

    Raises ConfigError as `read_drafter_settings`.
    """
    if named_kind(settings.drafter) is not None:
        return settings
    drafter = read_drafter_settings(str(settings.drafter))
    if kind_of(drafter).drafts != "blocks":
        return settings
    lengths = tuple(length for length in settings.lengths if length <= drafter.k)
    shorter = {"lengths": lengths, "max_draft": min(settings.max_draft, drafter.k)}
    given = settings.model_fields_set
    return settings.model_copy(update={k: v for k, v in shorter.items() if k not in given})


def check_tuning(settings: TuneConfig) -> None:
    """Refuse settings that cannot work, before anything is loaded. Raises ConfigError."""
    check_new_file(settings.report, "report", (".json",))
    for h in settings.h:
        if not 0.0 < h < 1.0:
            raise ConfigError(f"h = {h}: a threshold on a probability lies between 0 and 1")
    sizes = ("nodes", "levels", "delta") if settings.trees else ()
    for name in ("h", "lengths", "verifiers", *sizes):
        if not getattr(settings, name):
            raise ConfigError(f"{name} is empty; give one value at least")
    for name in sorted({"none", "sequoia"} & set(settings.trees)):
        raise ConfigError(
            f"trees = {name!r} cannot be tried: "
            + ("it is no tree; give [] for none" if name == "none" else NEEDS_RANKS)
        )
    check_method(base_method(settings))
    if max(settings.leniency) > 1.0:  # refused where it counts for nothing
        check_method(base_method(settings, leniency=max(settings.leniency)))
    for one in played_of(settings, settings.max_draft):
        check_method(one.decode)


def open_bench(settings: TuneConfig) -> Workbench:
    """Load and check heads, pair and prompts, the small things first. Raises ConfigError."""
    rows = load_both(settings)
    heads = {} if settings.heads is None else load_heads(str(settings.heads))
    drafter_settings = read_drafter_settings(str(settings.drafter))
    for name, head in heads.items():
        check_head_shape(head, drafter_settings, name)
        check_head_sampling(head, name, settings)
    check_same_states(heads, str(settings.heads))
    companions, bigrams = settings.cascade, settings.bigrams
    pair = load_pair(settings.target, str(settings.drafter), companions, bigrams=bigrams)
    checked: set[str] = set()
    for name, head in heads.items():
        trained_for = str((head.config.drafter or {}).get("weights_sha256"))
        if trained_for not in checked:
            check_head_identity(head, pair.drafter_model, name)
        checked.add(trained_for)
    target = CachedModel(pair.target.model)
    check_traceable(target, pair.drafter)
    heads = {name: head.to(pair.drafter_model.device) for name, head in heads.items()}
    choosing, reporting = read_both(pair.target, target, settings, rows)
    bench = Workbench(settings, pair, target, heads, choosing, reporting)
    deepest = settings.max_draft
    if bench.block:
        deepest = min(deepest, pair.drafter_model.config.k)
    played = played_of(settings, deepest)
    if not takes_trees(target, pair):
        played = [one for one in played if one.kind != "tree"]
    return replace(bench, played=played)


def base_method(settings: TuneConfig, **lenient: float) -> DecodeConfig:
    """The drafter as settings of decoding, with its default cascade where one is asked for."""
    cascade = settings.cascade and CascadeConfig(drafters=settings.cascade, **lenient)
    return DecodeConfig(
        drafter=settings.drafter,
        bigrams=settings.bigrams,
        cascade=cascade or None,
        sampling=settings.sampling,
    )


def played_of(settings: TuneConfig, deepest: int) -> list[Played]:
    """The trees and cascades that the settings ask for and the drafter's kind can be part of."""
    grows = read_kind(str(settings.drafter)).tree_rows is not None
    trees = trees_of(settings, deepest) if grows else []
    return [*trees, *cascades_of(settings)]


def takes_trees(target: CachedModel, pair: Pair) -> bool:
    """Whether the drafter has rows for trees, and both models can be given branches."""
    if pair.kind is None or pair.kind.tree_rows is None:
        return False
    alone = not pair.kind.is_language_model
    return target.takes_branches and (alone or pair.drafter.model.takes_branches)


def check_same_states(heads: Mapping[str, AcceptanceHead], folder: str) -> None:
    """One trace logs states of one kind. Raises ConfigError for heads that read several."""
    kinds = {head.config.state: name for name, head in heads.items()}
    if len(kinds) > 1:
        found = ", ".join(f"{name} reads {kind!r} states" for kind, name in kinds.items())
        raise ConfigError(
            f"heads = {folder!r} holds heads of several kinds: {found}; tune them one run at a time"
        )


def check_head_sampling(head: AcceptanceHead, name: str, settings: TuneConfig) -> None:
    """A head's labels must be made for the decoding it is tuned for. Raises ConfigError."""
    asked, trained = asdict(build_sampling(settings.sampling)), head.config.sampling or {}
    if trained.get("temperature") == asked["temperature"] == 0.0:
        return
    for key, value in trained.items():
        if key in asked and asked[key] != value:
            raise ConfigError(
                f"head {name!r} was trained for {key} = {value:g}, but sampling.{key} = "
                f"{asked[key]:g}; leave sampling.{key} out, or train a head for it"
            )
