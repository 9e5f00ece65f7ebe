"""The stop policies, a row each: what settings, sweeps, policy.json and checks ask about a kind.

Imports nothing heavy: a row names its class by a dotted path (`module:name`).
"""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.config.kinds import Evidence


@dataclass(frozen=True)
class StopKind:
    """What is known about a stop policy."""

    name: str
    """`stop.kind`."""
    policy: str
    """Its class, whose arguments are the settings."""
    settings: tuple[str, ...]
    """Fields of StopConfig that it goes by."""
    varied: str
    """The one that a sweep varies, without which policy.json says nothing."""
    requires: frozenset[Evidence] = frozenset()
    """What it goes by beside depth; a draft that does not show it is refused."""
    takes_trees: bool = False
    greedy_only: bool = False
    """Whether it would bias what is sampled: it goes by the drafted token itself."""
    in_policies: bool = True
    """Whether policy.json may name it: it speaks of chains alone."""

    @property
    def reads_head(self) -> bool:
        """Whether it goes by an acceptance head."""
        return "head" in self.settings


STOPS: dict[str, StopKind] = {
    stop.name: stop
    for stop in (
        StopKind(
            "fixed", "drafttrain.decoding.stopping:FixedLength", ("k",), "k", takes_trees=True
        ),
        StopKind(
            "head",
            "drafttrain.decoding.stopping:HeadPolicy",
            ("head", "h", "max_draft"),
            "h",
            frozenset({"hidden"}),
        ),
        StopKind(
            "entropy",
            "drafttrain.decoding.stopping:Entropy",
            ("entropy", "max_draft"),
            "entropy",
            frozenset({"logits"}),
        ),
        StopKind(
            "confidence",
            "drafttrain.decoding.stopping:Confidence",
            ("confidence", "max_draft"),
            "confidence",
            frozenset({"logits"}),
            greedy_only=True,
        ),
        StopKind(
            "gain",
            "drafttrain.decoding.stopping:Gain",
            ("delta", "max_draft"),
            "delta",
            frozenset({"expected"}),
            takes_trees=True,
            in_policies=False,
        ),
    )
}
"""All stop policies by name."""
