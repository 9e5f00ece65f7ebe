"""The stop policies, a row each: what settings, sweeps, policy.json and checks ask about a kind.

A policy is one function `(state, value) -> bool`: whether to draft one more token. Its row names it
by a dotted path (`module:name`): the table imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.config.kinds import Evidence


@dataclass(frozen=True)
class StopKind:
    """What is known about a stop policy."""

    name: str
    """`stop.kind`."""
    function: str
    """One that goes by an acceptance head is called with the head first, and gives the function."""
    shown: str
    """Its name in reports, made of the value and the most tokens of a round."""
    settings: tuple[str, ...]
    """Fields of StopConfig that it goes by; the last one bounds a round."""
    varied: str
    """The one that is its value: a sweep varies it, and without it policy.json says nothing."""
    requires: frozenset[Evidence] = frozenset()
    """What it goes by beside depth; a draft that does not show it is refused."""
    greedy_only: bool = False
    """Whether it would bias what is sampled: it goes by the drafted token itself."""

    @property
    def reads_head(self) -> bool:
        """Whether it goes by an acceptance head."""
        return "head" in self.settings


STOPS: dict[str, StopKind] = {
    stop.name: stop
    for stop in (
        StopKind(
            "fixed",
            "drafttrain.decoding.stopping:always",
            "k={0:g}",
            ("k",),
            varied="k",
        ),
        StopKind(
            "head",
            "drafttrain.decoding.stopping:HeadJudge",
            "head({0:g})",
            ("head", "h", "max_draft"),
            varied="h",
            requires=frozenset({"hidden"}),
        ),
        StopKind(
            "entropy",
            "drafttrain.decoding.stopping:certain",
            "entropy({0:g})",
            ("entropy", "max_draft"),
            varied="entropy",
            requires=frozenset({"logits"}),
        ),
        StopKind(
            "confidence",
            "drafttrain.decoding.stopping:confident",
            "confidence({0:g})",
            ("confidence", "max_draft"),
            varied="confidence",
            requires=frozenset({"logits"}),
            greedy_only=True,
        ),
        StopKind(
            "cumulative",
            "drafttrain.decoding.stopping:likely_so_far",
            "cumulative({0:g})",
            ("cumulative", "max_draft"),
            varied="cumulative",
            requires=frozenset({"logits"}),
        ),
        StopKind(
            "gain",
            "drafttrain.decoding.stopping:gaining",
            "gain({0:g},{1})",
            ("delta", "max_draft"),
            varied="delta",
            requires=frozenset({"expected"}),
        ),
    )
}
"""All stop policies by name."""
