"""Table of the kinds of drafters, with the properties of each kind.

A language model is of kind `causal` unless an entry of its config.json marks another kind. Other
models are identified by their model_type, and drafters without a model by their name in settings.
Rows name classes and functions by dotted paths (`module:name`) for `pkgutil.resolve_name`, so that
the table imports nothing heavy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

DrawKind = Literal["deterministic", "iid", "independent", "without_replacement"]
"""How sibling tokens are drawn: not sampled; independently from one distribution; independently,
each from its own distribution (several drafters); from one distribution without replacement."""
Evidence = Literal["logits", "hidden", "expected"]
"""Fields of `DraftState` that a stop policy may read."""
StateKind = Literal["drawn", "token"]
"""Kinds of hidden states that acceptance heads read, defined in `models/draft_states.py`."""
Program = Literal["custom_generate", "assisted", "servers", "parallel_servers"]
"""Classes of programs that can use an export: Transformers with drafttrain, Transformers' assisted
generation, servers (for decoder-only drafters), servers that support block drafts in one call."""


@dataclass(frozen=True)
class DrafterKind:
    """The properties that all drafters of a kind share."""

    name: str
    """`Drafter.name`, the name in reports, and the model_type of the kind's own models."""
    words: str
    """The noun phrase for such a drafter in messages."""
    opens: str
    """Function (model, target model or None) that makes the Drafter; kinds without a model get
    max-gram's table of next tokens, or None."""
    drafts: Literal["tokens", "blocks", "copies", "nothing"]
    """Its drafts: a token per model call, a block per call, copies of the text or nothing."""
    model: str | None = None
    """Class of its models; None if Transformers' Auto classes load them or it has no model."""
    marked_by: str | None = None
    """Entry of config.json that marks a language model as one of this kind."""
    checks: str | None = None
    """Function (config, name for messages) that raises ConfigError for an invalid config.json."""
    recipe: str | None = None
    """Settings class of the recipe that trains it for one target, recorded in its config.json."""
    draws: tuple[DrawKind, DrawKind] = ("deterministic", "deterministic")
    """How its tokens are drawn if the target decodes greedily, and if the target samples."""
    provides: frozenset[Evidence] = frozenset()
    """Fields of `DraftState` that its drafts provide in addition to depth."""
    tree_rows: str | None = None
    """Class (drafter, source, sampling, randomness) that computes the rows of draft trees for a
    sequence; None if it drafts only chains."""
    reads_target: bool = False
    """Whether it drafts from hidden states of its own target, with that target's projection."""
    exports: tuple[Program, ...] = ()
    """Classes of programs that can use its exports; empty if it cannot be exported."""
    teacher_forced_probs: str | None = None
    """Function that returns the probability of drafting each token of a known output at its prefix
    (`decoding/drafters/teacher_forced.py`)."""

    @property
    def is_model(self) -> bool:
        return self.drafts in ("tokens", "blocks")

    @property
    def runs_as_targets(self) -> bool:
        """Whether its models are language models, which the engine runs like targets."""
        return self.is_model and self.model is None

    @property
    def is_language_model(self) -> bool:
        """Whether it drafts token by token like a target, so it can review tokens of a cascade."""
        return self.drafts == "tokens" and self.runs_as_targets

    def draw_kind(self, greedy: bool) -> DrawKind:
        return self.draws[0 if greedy else 1]


_AT, _MODELS, _SETTINGS = "drafttrain.decoding.drafters", "drafttrain.models", "drafttrain.config"
_Blocks = partial(
    DrafterKind, drafts="blocks", draws=("deterministic", "iid"), provides=frozenset({"logits"})
)
_Slots = partial(
    _Blocks,
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
"""Copies from the text; needs no training."""
CAUSAL = DrafterKind(
    name="causal",
    words="a language model",
    opens=f"{_AT}.causal:CausalDrafter.of",
    drafts="tokens",
    draws=("deterministic", "iid"),
    provides=frozenset({"logits", "hidden"}),
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
BLOCK_HEADS = _Blocks(
    name="block-heads",
    words="block heads",
    opens=f"{_AT}.block_heads:BlockHeadsDrafter",
    model=f"{_MODELS}.block_heads:BlockHeads",
    recipe=f"{_SETTINGS}.recipes:BlockHeadsRecipe",
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
"""Copies of a target's layers that read the target's keys, values and hidden states."""
PARALLEL = _Slots(
    name="parallel",
    words="a parallel drafter",
    opens=f"{_AT}.parallel:ParallelDrafter.of",
    marked_by="pard_token",
    checks=f"{_MODELS}.parallel_drafter:check_blocks",
    recipe=f"{_SETTINGS}.recipes:CausalDrafterRecipe",
    exports=("custom_generate", "parallel_servers"),
)
"""A decoder-only language model that predicts a block per call from mask tokens (PARD)."""

KINDS: dict[str, DrafterKind] = {
    kind.name: kind
    for kind in (NONE, MAX_GRAM, SPEC_DRAFTER, BLOCK_HEADS, STATE_DRAFTER, PARALLEL, CAUSAL)
}
"""All kinds by name."""


def kind_of(settings: Any) -> DrafterKind:
    """Returns the kind of a drafter model from its config.json (a PretrainedConfig)."""
    return own_kind({"model_type": settings.model_type} | vars(settings)) or CAUSAL


def own_kind(config: Mapping[str, object]) -> DrafterKind | None:
    """Returns the kind that a config.json is marked as, or that has its model_type; else None."""
    for kind in KINDS.values():
        marked = kind.marked_by is not None and config.get(kind.marked_by) is not None
        if marked or (kind.model is not None and config.get("model_type") == kind.name):
            return kind
    return None


def named_kind(drafter: str | None) -> DrafterKind | None:
    """Returns the kind of a drafter given by name; None for a model's folder or Hub name."""
    kind = KINDS.get(drafter or "")
    return None if kind is None or kind.is_model else kind


def copies_text(drafter: str | None) -> bool:
    """Whether a drafter in settings copies from the text."""
    return named_kind(drafter) is MAX_GRAM


def in_words(kinds: list[DrafterKind]) -> str:
    """Returns text such as `a Spec-Drafter, block heads or a language model`."""
    names = [kind.words for kind in kinds]
    return " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
