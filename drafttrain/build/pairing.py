"""Checks that the parts of a method fit: drafters, tree or cascade, stop, verifier, sampling.

All commands check their settings here, with the tables of `config` and the drafters' config.json.
`decoding/verifiers.check_pairing` compares stop policy, verifier and drafts.
"""

from dataclasses import dataclass
from pathlib import Path

from drafttrain.build.drafts import build_shape
from drafttrain.build.heads import find_head
from drafttrain.config.base import ConfigError
from drafttrain.config.decode import (
    DecodeConfig,
    StopConfig,
    TreeConfig,
    VerifierConfig,
    check_given,
)
from drafttrain.config.kinds import (
    KINDS,
    MAX_GRAM,
    NONE,
    DrawKind,
    Evidence,
    copies_text,
    in_words,
    kind_of,
    named_kind,
)
from drafttrain.config.methods import GREEDY, RULES, STOPS, TREES, VerifierRule
from drafttrain.decoding.drafters.cascade import check_increments
from drafttrain.decoding.types import Sampling
from drafttrain.decoding.verifiers import check_pairing
from drafttrain.models.drafters import read_drafter_settings, read_kind

MOST_NODES = 1024
"""Maximal number of draft tokens of a tree."""
Drafters = tuple[tuple[str, ...], str | None]
"""The drafters of checked methods, for `load_pair(target, *drafters)`: all drafters, starting with
that of the first method, and the file of max-gram's table, if given."""


@dataclass(frozen=True)
class DraftProperties:
    """The properties of a method's drafts that `check_pairing` reads, without a drafter."""

    name: str
    provides: frozenset[Evidence]
    drafts_trees: bool
    drawn: DrawKind

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        return self.drawn


def check_methods(*methods: DecodeConfig) -> Drafters:
    """Checks the settings of methods before any large model is loaded.

    Raises ConfigError for a setting that the method does not use, a tree that the drafter cannot
    draft, an invalid cascade, a head that is missing or reads other states than the drafter has,
    and several max-gram tables; ValueError as `check_pairing` and `check_increments` do.
    """
    for method in methods:
        _check_method(method)
    tables = {method.bigrams for method in methods if any(map(copies_text, method.drafters))}
    if len(tables) > 1:
        shown = " and ".join(sorted(map(repr, tables)))
        raise ConfigError(f"bigrams = {shown}; give all methods with max-gram one table, or none")
    names = dict.fromkeys(name for method in methods for name in method.drafters)
    return tuple(names), tables.pop() if tables else None


def method_stop(decode: DecodeConfig) -> StopConfig:
    """Returns the settings of the stop policy: a cascade drafts all its increments; a tree has its
    own default (`TreeKind.stop`) unless a policy or a length is given."""
    if decode.cascade is not None:
        return StopConfig(kind="fixed", k=sum(decode.cascade.matrix()[0]))
    if decode.stop.model_fields_set & {"kind", "k"}:
        return decode.stop
    own = TREES[decode.tree.kind].stop
    return StopConfig(kind=own, **decode.stop.model_dump(exclude_unset=True))


def _check_method(decode: DecodeConfig) -> None:
    check_given("tree", decode.tree, TREES)
    check_given("verifier", decode.verifier, RULES)
    if decode.bigrams is not None and not any(map(copies_text, decode.drafters)):
        raise ConfigError(
            f"bigrams = {decode.bigrams!r} is for drafter 'max-gram' only; leave it out"
        )
    if decode.cascade is not None:
        _check_cascade(decode)
    decode = decode.model_copy(update={"stop": method_stop(decode)})
    check_given("stop", decode.stop, STOPS)
    sampling = Sampling(decode.sampling.temperature)
    if TREES[decode.tree.kind].shape is not None:
        drafts = _check_tree(decode)
    else:
        kind = read_kind(str(decode.drafter))
        drafts = DraftProperties(kind.name, kind.provides, False, kind.draw_kind(sampling.greedy))
    stop = STOPS[decode.stop.kind]
    check_pairing(drafts, stop, rule_of(decode.verifier, sampling.greedy, decode.tree), sampling)
    if named_kind(decode.drafter) is NONE:
        _check_plain(decode)
    if stop.reads_head:
        drafter = str(decode.drafter)
        find_head(decode.stop.head, drafter, read_drafter_settings(drafter))


def _check_plain(decode: DecodeConfig) -> None:
    for group in ("stop", "verifier"):
        for name, value in getattr(decode, group).model_dump(exclude_unset=True).items():
            if value not in ("auto", "fixed"):
                raise ConfigError(
                    f"{group}.{name} = {value!r}, but drafter {NONE.name!r} drafts nothing; leave "
                    "it out, or give a drafter"
                )


def _check_tree(decode: DecodeConfig) -> DraftProperties:
    """Checks the settings of a tree and returns the properties of its drafts."""
    tree, kind, name = decode.tree, TREES[decode.tree.kind], str(decode.drafter)
    settings = None if named_kind(name) is not None else read_drafter_settings(name)
    drafter = named_kind(name) if settings is None else kind_of(settings)
    if settings is None or drafter.tree_rows is None:
        tree_kinds = in_words([one for one in KINDS.values() if one.tree_rows is not None])
        raise ConfigError(
            f"tree.kind = {tree.kind!r}, but drafter {name!r} ({drafter.words}) can only draft "
            f"chains; leave the tree out, or give {tree_kinds}"
        )
    if kind.drawn and decode.sampling.temperature == 0 and tree.draft_temperature is None:
        raise ConfigError(
            f"tree.kind = {tree.kind!r} samples its tokens, but at temperature 0 all samples are "
            "equal; set tree.draft_temperature=1, or use opt-tree or a fixed tree"
        )
    for other in tree.drafters:
        if not read_kind(other).is_language_model:
            raise ConfigError(
                f"tree.drafters = {other!r} is {read_kind(other).words}, but several drafters must "
                "all be language models; give one, or leave it out"
            )
    if (nodes := kind.nodes(tree, decode.stop.k)) > MOST_NODES:
        raise ConfigError(
            f"tree.kind = {tree.kind!r} has {nodes} draft tokens, more than {MOST_NODES}; give a "
            f"smaller tree.{kind.settings[0]} or stop.k"
        )
    shape = build_shape(tree, decode.stop.k)
    vocabulary = settings.get_text_config(decoder=True).vocab_size
    if shape.widest > vocabulary:
        raise ConfigError(
            f"tree {shape.name!r} has {shape.widest} siblings, but the drafter's vocabulary has "
            f"{vocabulary} tokens; make the tree narrower"
        )
    drawn = "independent" if tree.drafters else kind.draw_kind
    return DraftProperties(shape.name, kind.provides, shape.drafts_trees, drawn)


def _check_cascade(decode: DecodeConfig) -> None:
    paths = list(decode.drafters)
    for level, path in enumerate(paths):
        named = named_kind(path)
        if named is not None and not (copies_text(path) and level == len(paths) - 1):
            raise ConfigError(
                f"{path!r} ({named.words}) is level {level + 1} of a cascade of {paths}; a cascade "
                f"has models and, as its last level only, {MAX_GRAM.name!r}"
            )
        if Path(path) in map(Path, paths[:level]):
            raise ConfigError(f"{path!r} is twice in the cascade of {paths}; give each level once")
    matrix = decode.cascade.matrix()
    check_increments(matrix, paths)
    if "k" in decode.stop.model_fields_set or decode.stop.kind != "fixed":
        raise ConfigError(
            "stop is given, but the draft length of a cascade is the sum of the first row of its "
            f"increments ({sum(matrix[0])}); leave --k and --stop out"
        )
    if TREES[decode.tree.kind].shape is not None:
        raise ConfigError(
            f"tree.kind = {decode.tree.kind!r}, but a cascade drafts chains; leave one out"
        )


def rule_of(config: VerifierConfig, greedy: bool, tree: TreeConfig) -> VerifierRule:
    """Returns the verifier rule; `auto` is greedy match at temperature 0, else the tree's rule."""
    if config.kind != "auto":
        return RULES[config.kind]
    kind = TREES[tree.kind]
    several = kind.rule_of_several if tree.drafters else None
    return GREEDY if greedy else RULES[several or kind.rule]
