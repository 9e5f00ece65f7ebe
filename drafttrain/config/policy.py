"""policy.json: the stop policy and the verifier that were chosen for a drafter.

    {"drafter": "spec-drafter", "stop": "fixed", "k": 10, "verifier": {"kind": "auto"}}

is the whole triple: what proposes, when a round of drafting ends, what is accepted. A `method`
beside it is the tree or cascade that is faster, for programs that can decode with one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, PositiveFloat, ValidationError

from drafttrain.config.base import Config, ConfigError, Count, Few, Fraction
from drafttrain.config.decode import DecodeConfig, StopConfig, VerifierConfig, check_given
from drafttrain.config.methods import RULES, STOPS
from drafttrain.config.reading import first_problem

POLICY = "policy.json"
HEAD = "acceptance_head"
"""Folder of the head in an export."""
DEFAULT_H = 0.7
"""Best in the paper (SpecDec++ Section 4), for heads without a policy.json."""
PolicyStop = Literal[*(name for name, stop in STOPS.items() if "expected" not in stop.requires)]
"""Those of chains: what they go by is not the expected acceptance of a tree."""


class Policy(Config):
    """policy.json: what was chosen for a drafter, and for which decoding.

    Its stop policy is that of a chain, which every program can follow; `method` is what this one
    decodes with where that is faster. It lies beside the acceptance head's folder; other keys in it
    are facts about the choice.
    """

    model_config = ConfigDict(extra="ignore")

    stop: PolicyStop
    """Kind of the stop policy, as StopConfig has it."""
    k: Few | None = None
    """Tokens drafted in a round by a fixed policy."""
    max_draft: Few = 20
    """Most tokens drafted in a round by the others."""
    head: str | None = None
    """Name of the head (D3-w6): its folder in a run of heads."""
    h: Fraction | None = None
    """Stop when a rejection is likelier than this."""
    entropy: PositiveFloat | None = None
    """Stop after a row of more nats than this."""
    confidence: Fraction | None = None
    """Stop after a token of less than this probability."""
    cumulative: Fraction | None = None
    """Stop once the product of the rows' largest probabilities is less than this."""
    sampling: dict[str, float] = {}
    """Temperature, top_k, top_p, min_p it was chosen for; under others the output is as exact."""
    drafter: str | None = None
    """What proposes: in an export the drafter's model_type (spec-drafter, llama, ...)."""
    verifier: VerifierConfig = VerifierConfig()
    """How drafted tokens are accepted; spec-verification counts in greedy decoding only."""
    method: DecodeConfig | None = None
    """The tree or cascade that is faster than the chain; None: none is. For sampling of the kind
    that it was chosen for."""
    speculate: bool = True
    """False: plain decoding was faster than every draft, in decoding of that kind."""
    batches: dict[Count, Policy] = {}
    """The policies of larger numbers of sequences decoded at once."""

    def at(self, batch_size: int) -> Policy:
        """The policy chosen for the largest measured batch size up to this one; else this."""
        smaller = [size for size in self.batches if size <= batch_size]
        return self.batches[max(smaller)] if smaller else self

    def chosen_for(self, greedy: bool) -> bool:
        """Whether it was chosen for decoding of this kind."""
        return greedy == (self.sampling.get("temperature", 0.0) == 0.0)

    def stop_config(self) -> StopConfig:
        """The stop policy as settings, without the head's folder, which only its user knows."""
        names = set(STOPS[self.stop].settings) - {"head"}
        return StopConfig(kind=self.stop, **self.model_dump(include=names, exclude_none=True))

    def verifier_for(self, greedy: bool) -> VerifierConfig:
        """The verifier for decoding of this kind: `auto`, the lossless one, takes the place of a
        rule that is for another kind."""
        rule, draw_kind = RULES.get(self.verifier.kind), "deterministic" if greedy else "iid"
        if rule is None or not rule.fits(greedy, draw_kind):
            return VerifierConfig()
        return self.verifier

    @property
    def lossy(self) -> bool:
        """Whether decoding under the policy may differ from the target's own."""
        rule = RULES.get(self.verifier.kind)
        return rule is not None and not rule.lossless


def read_policy(file: Path) -> Policy:
    """A policy.json. Raises ConfigError for a file that is none, or lacks its policy's value."""
    try:
        return parse_policy(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}); `drafttrain tune` writes one"
        ) from None


def parse_policy(content: str | Mapping[str, Any], name: str = "policy") -> Policy:
    """The content of a policy.json, as text or values. Raises ConfigError as `read_policy`."""
    parse = Policy.model_validate_json if isinstance(content, str) else Policy.model_validate
    try:
        policy = parse(content)
    except ValidationError as error:
        raise ConfigError(
            f"{name} is no policy.json ({first_problem(error)}); `drafttrain tune` writes one"
        ) from None
    check_policy(policy, name)
    return policy


def check_policy(policy: Policy, name: str) -> None:
    """A policy must hold the one value that its kind goes by. Raises ConfigError."""
    for size, own in policy.batches.items():
        check_policy(own, f"{name}: batch {size}")
    field = STOPS[policy.stop].varied
    if getattr(policy, field) is None:
        raise ConfigError(f"{name}: stop is {policy.stop!r} but there is no {field}; add {field}")
    try:
        check_given("verifier", policy.verifier, RULES)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def dump_policy(policy: Policy) -> dict[str, Any]:
    """The policy as JSON values, without what its stop or its verifier does not go by."""
    rule = RULES.get(policy.verifier.kind)
    nested = {"max_draft", "verifier", "method", "batches"}
    values = policy.model_dump(mode="json", exclude_defaults=True, exclude=nested)
    if "max_draft" in STOPS[policy.stop].settings or policy.head is not None:
        values["max_draft"] = policy.max_draft  # a head may still be asked for
    used = {"kind", *(() if rule is None else rule.settings)}
    values["verifier"] = policy.verifier.model_dump(include=used)
    if policy.method is not None:
        method = policy.method.model_dump(mode="json", exclude_none=True, exclude_unset=True)
        values["method"] = method
    if policy.batches:
        values["batches"] = {str(size): dump_policy(own) for size, own in policy.batches.items()}
    return values
