"""The kinds of drafters, a row each: what everybody may ask about a kind.

Every language model is of kind `causal`; other models are known by the model_type of their
config.json, and drafters that are no models by the name that settings give them. A row names
classes and functions by dotted paths (`module:name`), which `pkgutil.resolve_name` finds where they
are used, so that the table imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

DrawKind = Literal["deterministic", "iid", "independent", "without_replacement"]
"""How siblings come about: no chance in it; independently from one row; independently, each from a
row of its own (several drafters); from one row, never twice the same token."""

Evidence = Literal["logits", "hidden", "expected"]
"""What a stop policy may look at: fields of `DraftState`."""

StateKind = Literal["token", "drawn", "slot"]
"""The states that acceptance heads read; `models/draft_states.py` says what they are."""

Program = Literal["custom_generate", "assisted", "servers"]
"""What can use an export: Transformers with drafttrain, Transformers' own assisted generation,
serving programs (decoder-only drafters); `config/engines.py` has a row for each of the latter."""


@dataclass(frozen=True)
class DrafterKind:
    """What is known about every drafter of a kind."""

    name: str
    """As `Drafter.name` and reports have it; the model_type of the kind's own models."""
    words: str
    """What messages call one."""
    described: str
    """The same as what follows "drafter 'x'", with {shape} and {model_type} of its config.json."""
    opens: str
    """Function (what it drafts with, the target's model or None) -> Drafter; it drafts with a
    model, with a table of likeliest successors, or with None."""
    drafts: Literal["tokens", "blocks", "copies", "nothing"]
    """One token a call of the model, a block of slots in one pass, copies of the text, nothing."""
    model: str | None = None
    """Class of its models; None: language models are loaded by Transformers' Auto classes, and
    others have none."""
    recipe: str | None = None
    """Settings of the recipe that trains it, where it is trained for one target, whose tokens it
    shares by construction and whose path its config.json has."""
    draws: tuple[DrawKind, DrawKind] = ("deterministic", "deterministic")
    """How its tokens are drawn where the target decodes greedily, and where it samples."""
    provides: frozenset[Evidence] = frozenset()
    """What stop policies see of its drafts, beside depth."""
    states: tuple[StateKind, ...] = ()
    """What acceptance heads can read of its drafts, the usual kind of states first."""
    tree_rows: str | None = None
    """Function (drafter, source, sampling, randomness) -> the rows of a sequence that a draft tree
    grows over; None: it drafts chains only."""
    reads_target: bool = False
    """Whether it drafts from the target's hidden states, through its output projection: the target
    must be the one that it was trained on, of a family whose projection is known."""
    exports: tuple[Program, ...] = ()
    """What can use it once it is exported; empty: it cannot be."""
    blocks_along: str | None = None
    """Function (what the drafter runs, source that the target has read, target ids [L], k) -> what
    it drafts greedily at every prefix [L, k], for teacher-forced acceptance."""

    @property
    def is_model(self) -> bool:
        return self.drafts in ("tokens", "blocks")

    @property
    def is_language_model(self) -> bool:
        """Whether the engine runs it as it runs targets: it can review other drafters' tokens."""
        return self.drafts == "tokens" and self.model is None

    @property
    def for_one_target(self) -> bool:
        """Whether it is trained for one target and has its tokens."""
        return self.recipe is not None

    def draw_kind(self, greedy: bool) -> DrawKind:
        return self.draws[0 if greedy else 1]


NONE = DrafterKind(
    name="none",
    words="plain decoding",
    described="drafts nothing",
    opens="drafttrain.decoding.drafters.none:open_drafter",
    drafts="nothing",
    provides=frozenset({"logits", "hidden", "expected"}),  # of no draft: any stop policy goes
)
"""Plain decoding."""

MAX_GRAM = DrafterKind(
    name="max-gram",
    words="max-gram",
    described="copies from the text itself",
    opens="drafttrain.decoding.drafters.max_gram:open_drafter",
    drafts="copies",
)
"""Copies from the text itself; needs no training."""

CAUSAL = DrafterKind(
    name="causal",
    words="a language model",
    described="is {shape} ({model_type!r})",
    opens="drafttrain.decoding.drafters.causal:open_drafter",
    drafts="tokens",
    draws=("deterministic", "iid"),
    provides=frozenset({"logits", "hidden"}),
    states=("drawn", "token"),
    tree_rows="drafttrain.decoding.drafters.tree:rows_of_model",
    blocks_along="drafttrain.decoding.drafters.causal:blocks_along",
    exports=("custom_generate", "assisted", "servers"),
)
"""Any language model, encoder-decoder or decoder-only."""

SPEC_DRAFTER = DrafterKind(
    name="spec-drafter",
    words="a Spec-Drafter",
    described="is a Spec-Drafter, which reads a source of its own",
    opens="drafttrain.decoding.drafters.block:open_drafter",
    drafts="blocks",
    model="drafttrain.models.spec_drafter.model:SpecDrafter",
    recipe="drafttrain.config.recipes:SpecDrafterRecipe",
    draws=("deterministic", "iid"),
    provides=frozenset({"logits", "hidden"}),
    states=("slot",),
    tree_rows="drafttrain.decoding.drafters.tree:rows_of_slots",
    exports=("custom_generate",),
    blocks_along="drafttrain.decoding.drafters.block:blocks_along",
)

BLOCK_HEADS = DrafterKind(
    name="block-heads",
    words="block heads",
    described="holds block heads of {shape}",
    opens="drafttrain.decoding.drafters.block_heads:open_drafter",
    drafts="blocks",
    model="drafttrain.models.block_heads:BlockHeads",
    recipe="drafttrain.config.recipes:BlockHeadsRecipe",
    draws=("deterministic", "iid"),
    provides=frozenset({"logits"}),
    reads_target=True,
)

KINDS: dict[str, DrafterKind] = {
    kind.name: kind for kind in (NONE, MAX_GRAM, SPEC_DRAFTER, BLOCK_HEADS, CAUSAL)
}
"""All kinds by name."""


TRAINED_DECODERS = {"WhisperForCausalLM": "drafttrain.config.recipes:ShallowDecoderRecipe"}
"""Settings of the recipe that trains a language model for one target, by the architecture that its
config.json names."""
TRAINED_CAUSAL = "drafttrain.config.recipes:CausalDrafterRecipe"
"""The same for language models of all other architectures whose config.json names a target."""


class ModelSettings(Protocol):
    """A model's config.json, as far as its kind goes."""

    model_type: str


def kind_of(settings: ModelSettings) -> DrafterKind:
    """The kind of a drafter that is a model, from its config.json."""
    own = own_kind(settings.model_type)
    return CAUSAL if own is None else own


def own_kind(model_type: str | None) -> DrafterKind | None:
    """The kind whose own models are of this type; None: some other model."""
    kind = KINDS.get(model_type or "")
    return None if kind is None or kind.model is None else kind


def named_kind(drafter: str | None) -> DrafterKind | None:
    """The kind that a name in settings is of; None: it is a folder or Hub name of a model."""
    kind = KINDS.get(drafter or "")
    return None if kind is None or kind.is_model else kind


def copies_text(drafter: str | None) -> bool:
    """Whether settings name a drafter that copies from the text itself."""
    kind = named_kind(drafter)
    return kind is not None and kind.drafts == "copies"


def in_words(kinds: list[DrafterKind]) -> str:
    """`a Spec-Drafter, block heads or a language model`."""
    names = [kind.words for kind in kinds]
    return " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def with_states() -> str:
    """The kinds whose drafts acceptance heads can read, for messages."""
    return in_words([kind for kind in KINDS.values() if kind.states])
