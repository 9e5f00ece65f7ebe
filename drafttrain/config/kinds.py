"""The kinds of drafters, a row each: what everybody may ask about a kind.

Language models are of kind `causal`, unless their config.json has the entry that marks another
kind; other models are known by the model_type of their config.json, and drafters that are no models
by the name that settings give them. A row names classes and functions by dotted paths
(`module:name`), which `pkgutil.resolve_name` finds: the table imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

DrawKind = Literal["deterministic", "iid", "independent", "without_replacement"]
"""How siblings are drawn: not at all; independently from one row; independently, each from a row of
its own (several drafters); from one row, never twice the same token."""

Evidence = Literal["logits", "hidden", "expected"]
"""What a stop policy may look at: fields of `DraftState`."""

StateKind = Literal["token", "drawn", "slot"]
"""The states that acceptance heads read; `models/draft_states.py` says what they are."""

Program = Literal["custom_generate", "assisted", "servers", "parallel_servers"]
"""What can use an export: Transformers with drafttrain, Transformers' own assisted generation,
serving programs (decoder-only drafters), those of them that draft a block in one call."""


@dataclass(frozen=True)
class DrafterKind:
    """What is known about every drafter of a kind."""

    name: str
    """As `Drafter.name` and reports have it; the model_type of the kind's own models."""
    words: str
    """What messages call one."""
    opens: str
    """What makes the Drafter: of its model and the target's (or None), else of a table of likeliest
    successors, or of None."""
    drafts: Literal["tokens", "blocks", "copies", "nothing"]
    """One token a call of the model, a block of slots in one pass, copies of the text, nothing."""
    model: str | None = None
    """Class of its models; None: Transformers' Auto classes load them, or it has none."""
    marked_by: str | None = None
    """Entry of config.json that its models have and other language models have not."""
    checks: str | None = None
    """Function (config.json, what messages call the drafter), which raises ConfigError."""
    recipe: str | None = None
    """Settings of the recipe that trains it for one target, whose path its config.json has."""
    draws: tuple[DrawKind, DrawKind] = ("deterministic", "deterministic")
    """How its tokens are drawn where the target decodes greedily, and where it samples."""
    provides: frozenset[Evidence] = frozenset()
    """What stop policies see of its drafts, beside depth."""
    states: tuple[StateKind, ...] = ()
    """What acceptance heads can read of its drafts, the usual kind of states first; of slots also
    along known outputs (`TeacherForcedSession.slots`)."""
    tree_rows: str | None = None
    """Class (drafter, source, sampling, randomness) of the rows of a sequence that a draft tree
    grows over; None: it drafts chains only."""
    reads_target: bool = False
    """Whether it drafts from hidden states of the target that it was trained on, through the
    target's output projection."""
    exports: tuple[Program, ...] = ()
    """What can use it once it is exported; empty: it cannot be."""
    teacher_forced_probs: str | None = None
    """Function that says how likely a drafter drafts a known output's own tokens at every prefix
    (`decoding/drafters/teacher_forced.py`), for teacher-forced acceptance."""

    @property
    def is_model(self) -> bool:
        return self.drafts in ("tokens", "blocks")

    @property
    def runs_as_targets(self) -> bool:
        """Whether its models are language models of Transformers, which the engine runs as it runs
        targets."""
        return self.is_model and self.model is None

    @property
    def is_language_model(self) -> bool:
        """Whether it drafts as targets decode: it can review other drafters' tokens."""
        return self.drafts == "tokens" and self.runs_as_targets

    @property
    def for_one_target(self) -> bool:
        """Whether all of them are trained for one target and have its tokens."""
        return self.recipe is not None and not self.runs_as_targets

    def draw_kind(self, greedy: bool) -> DrawKind:
        return self.draws[0 if greedy else 1]


_AT, _MODELS, _SETTINGS = "drafttrain.decoding.drafters", "drafttrain.models", "drafttrain.config"
_Model = partial(
    DrafterKind, draws=("deterministic", "iid"), provides=frozenset({"logits", "hidden"})
)
_Slots = partial(
    _Model,
    drafts="blocks",
    states=("slot",),
    tree_rows=f"{_AT}.tree:SlotRows",
    teacher_forced_probs=f"{_AT}.teacher_forced:teacher_forced_probs",
)

NONE = DrafterKind("none", "plain decoding", f"{_AT}.none:NoDrafter", "nothing")
MAX_GRAM = DrafterKind(
    name="max-gram",
    words="max-gram",
    opens=f"{_AT}.max_gram:MaxGramDrafter",
    drafts="copies",
    teacher_forced_probs=f"{_AT}.teacher_forced:teacher_forced_probs",
)
"""Needs no training."""
CAUSAL = _Model(
    name="causal",
    words="a language model",
    opens=f"{_AT}.causal:CausalDrafter.of",
    drafts="tokens",
    states=("drawn", "token"),
    tree_rows=f"{_AT}.tree:ModelRows",
    teacher_forced_probs=f"{_AT}.causal:teacher_forced_probs",
    exports=("custom_generate", "assisted", "servers"),
)
"""Any language model, encoder-decoder or decoder-only."""
SPEC_DRAFTER = _Slots(
    name="spec-drafter",
    words="a Spec-Drafter",
    opens=f"{_AT}.block:BlockDrafter",
    model=f"{_MODELS}.spec_drafter.model:SpecDrafter",
    marked_by="spec_drafter",
    recipe=f"{_SETTINGS}.recipes:SpecDrafterRecipe",
    exports=("custom_generate",),
)
BLOCK_HEADS = _Model(
    name="block-heads",
    words="block heads",
    opens=f"{_AT}.block_heads:BlockHeadsDrafter",
    drafts="blocks",
    model=f"{_MODELS}.block_heads:BlockHeads",
    recipe=f"{_SETTINGS}.recipes:BlockHeadsRecipe",
    provides=frozenset({"logits"}),
    reads_target=True,
)
STATE_DRAFTER = _Slots(
    name="state-drafter",
    words="a state drafter",
    opens=f"{_AT}.state:TargetStatesDrafter",
    model=f"{_MODELS}.state_drafter:StateDrafter",
    checks=f"{_MODELS}.state_drafter:check_own_layers",
    recipe=f"{_SETTINGS}.recipes:StateDrafterRecipe",
    reads_target=True,
    exports=("custom_generate",),
)
"""Copies of a target's layers over its own keys, values and hidden states."""
PARALLEL = _Slots(
    name="parallel",
    words="a parallel drafter",
    opens=f"{_AT}.parallel:ParallelDrafter.of",
    marked_by="pard_token",
    checks=f"{_MODELS}.parallel_drafter:check_blocks",
    recipe=f"{_SETTINGS}.recipes:ParallelDrafterRecipe",
    exports=("custom_generate", "parallel_servers"),
)
"""A decoder-only language model that predicts a block through masks of one token (PARD)."""

KINDS: dict[str, DrafterKind] = {
    kind.name: kind
    for kind in (NONE, MAX_GRAM, SPEC_DRAFTER, BLOCK_HEADS, STATE_DRAFTER, PARALLEL, CAUSAL)
}
"""All kinds by name."""


def kind_of(settings: Any) -> DrafterKind:
    """The kind of a drafter that is a model, from its config.json (a PretrainedConfig)."""
    own = own_kind({"model_type": settings.model_type} | vars(settings))
    return CAUSAL if own is None else own


def own_kind(config: Mapping[str, object]) -> DrafterKind | None:
    """The kind that a config.json is marked as, or whose own models are of its type; None: some
    other model."""
    for kind in KINDS.values():
        marked = kind.marked_by is not None and config.get(kind.marked_by) is not None
        if marked or (kind.model is not None and config.get("model_type") == kind.name):
            return kind
    return None


def named_kind(drafter: str | None) -> DrafterKind | None:
    """The kind that a name in settings is of; None: it is a folder or Hub name of a model."""
    kind = KINDS.get(drafter or "")
    return None if kind is None or kind.is_model else kind


def copies_text(drafter: str | None) -> bool:
    """Whether settings name a drafter that copies from the text itself."""
    return named_kind(drafter) is MAX_GRAM


def in_words(kinds: list[DrafterKind]) -> str:
    """`a Spec-Drafter, block heads or a language model`."""
    names = [kind.words for kind in kinds]
    return " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
