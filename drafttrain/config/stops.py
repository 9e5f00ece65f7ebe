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
    """Fields of StopConfig that it goes by: at the end its value and what bounds a round, which may
    be the same one."""
    requires: frozenset[Evidence] = frozenset()
    """What it goes by beside depth; a draft that does not show it is refused."""
    greedy_only: bool = False
    """Whether it would bias what is sampled: it goes by the drafted token itself."""

    @property
    def varied(self) -> str:
        """The setting that is its value: a sweep varies it, policy.json must have it."""
        return self.settings[-2:][0]

    @property
    def reads_head(self) -> bool:
        """Whether it goes by an acceptance head."""
        return "head" in self.settings


_AT = "drafttrain.decoding.stopping"
_LOGITS, _HIDDEN, _EXPECTED = (frozenset({name}) for name in ("logits", "hidden", "expected"))
_MOST = "max_draft"

STOPS: dict[str, StopKind] = {
    stop.name: stop
    for stop in (
        StopKind("fixed", f"{_AT}:always", "k={0:g}", ("k",)),
        StopKind("head", f"{_AT}:HeadJudge", "head({0:g})", ("head", "h", _MOST), _HIDDEN),
        StopKind("entropy", f"{_AT}:certain", "entropy({0:g})", ("entropy", _MOST), _LOGITS),
        StopKind(
            "confidence",
            f"{_AT}:confident",
            "confidence({0:g})",
            ("confidence", _MOST),
            _LOGITS,
            True,
        ),
        StopKind(
            "cumulative",
            f"{_AT}:likely_so_far",
            "cumulative({0:g})",
            ("cumulative", _MOST),
            _LOGITS,
        ),
        StopKind("gain", f"{_AT}:gaining", "gain({0:g},{1})", ("delta", _MOST), _EXPECTED),
    )
}
"""All stop policies by name."""
