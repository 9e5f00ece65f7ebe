"""What teacher-forced acceptance cannot tell is refused, before any weights are read."""

from __future__ import annotations

from collections.abc import Sequence

from drafttrain.build.verifiers import AUTO
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import EvalConfig
from drafttrain.config.decode import DecodeConfig
from drafttrain.config.kinds import KINDS, in_words
from drafttrain.config.trees import TREES
from drafttrain.config.verifiers import GREEDY
from drafttrain.evaluation.others import OtherMethod
from drafttrain.models.drafters import can_assist, read_drafter_settings, read_kind

FOLLOWED = (AUTO.kind, GREEDY.name, "rejection", "block")
"""Rules whose rounds can be told from the target's own output."""
REMEDY = "; leave it out, or use --mode decode"


def check_teacher_forced(
    settings: EvalConfig, variants: Sequence[DecodeConfig], others: Sequence[OtherMethod]
) -> None:
    """Refuse what acceptance along the target's own outputs does not tell. Raises ConfigError.

    variants: the methods of the drafter.
    """
    if max(settings.batch_sizes, default=1) > 1:
        shown = ", ".join(map(str, settings.batch_sizes))
        raise ConfigError(f"batch_sizes = {shown}, but teacher-forced acceptance has none{REMEDY}")
    named = [("", variant) for variant in variants]
    named += [(f"others.{other.name}.", other.config) for other in others]
    for prefix, method in named:
        check_drafter(prefix, method)
        check_chain(prefix, method)
    if settings.p_min and not settings.served:
        raise ConfigError(
            "p_min is a setting of llama.cpp, but served = false leaves out what engines would "
            "accept; leave either out"
        )
    drafters = dict.fromkeys(str(method.drafter) for _, method in named)
    if settings.p_min and not any(map(can_assist, drafters)):
        words = in_words([read_kind(drafter) for drafter in drafters])
        raise ConfigError(
            f"p_min is a setting of llama.cpp, which does not draft with {words}; leave it out"
        )


def check_drafter(prefix: str, method: DecodeConfig) -> None:
    """Refuse drafters that cannot tell how likely they draft an output's own tokens.

    prefix: what stands before the names of the method's settings.
    """
    name, kind = str(method.drafter), read_kind(str(method.drafter))
    if kind.drafts == "nothing":
        raise ConfigError(f"{prefix}drafter = {name!r} has no acceptance to estimate{REMEDY}")
    if method.cascade is not None:
        raise ConfigError(
            f"{prefix}cascade is given, but teacher-forced acceptance is of one drafter's own "
            f"drafts{REMEDY}"
        )
    if kind.probs_along is None:
        known = in_words([kind for kind in KINDS.values() if kind.probs_along is not None])
        raise ConfigError(
            f"{prefix}drafter = {name!r} holds {kind.words}, but teacher-forced acceptance is of "
            f"drafts as those of {known}; use --mode decode"
        )
    if kind.drafts != "blocks":
        return
    drafter = read_drafter_settings(name)
    if method.stop.k > drafter.k:
        raise ConfigError(
            f"{prefix}stop.k = {method.stop.k}, but teacher-forced acceptance is known up to the "
            f"k = {drafter.k} that {name!r} was trained with; use --mode decode"
        )


def check_chain(prefix: str, method: DecodeConfig) -> None:
    """Refuse drafts that are no chains of a fixed length, and rules that may change the output."""
    if TREES[method.tree.kind].shape is not None:
        raise ConfigError(
            f"{prefix}tree.kind = {method.tree.kind!r} drafts trees, but teacher-forced acceptance "
            f"is of chains{REMEDY}"
        )
    if method.verifier.kind not in FOLLOWED:
        raise ConfigError(
            f"{prefix}verifier.kind = {method.verifier.kind!r}, but teacher-forced acceptance is "
            f"that of {', '.join(FOLLOWED)}{REMEDY}"
        )
    if method.stop.kind != "fixed":
        raise ConfigError(
            f"{prefix}stop.kind = {method.stop.kind!r} drafts different lengths, but "
            f"teacher-forced acceptance is of fixed ones{REMEDY}"
        )
