"""policy.json: the stop policy and verifier that were chosen for a drafter, such as

{"drafter": "spec-drafter", "stop": "fixed", "k": 10, "verifier": {"kind": "auto"}}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, PositiveFloat, ValidationError, model_validator

from drafttrain.config.base import Config, ConfigError, Count, Few, Fraction
from drafttrain.config.decode import DecodeConfig, StopConfig, VerifierConfig, check_given
from drafttrain.config.methods import RULES, STOPS, VerifierRule
from drafttrain.config.reading import first_problem

POLICY = "policy.json"
HEAD = "acceptance_head"
"""Name of the head's folder in an export."""
DEFAULT_H = 0.7
"""Threshold for heads without a policy.json: the paper's best (SpecDec++ Section 4)."""
PolicyStop = Literal[*(name for name, stop in STOPS.items() if "expected" not in stop.requires)]
"""Stop policies for chains; those that read the expected acceptance of a tree are left out."""


class Policy(Config):
    """The content of policy.json: the choice for a drafter and the sampling it was made for.

    Its stop policy is for chains, which every program supports; only drafttrain uses `method`. The
    file lies next to the acceptance head's folder. Other keys in it are facts about the choice.
    """

    model_config = ConfigDict(extra="ignore")

    stop: PolicyStop
    """Kind of the stop policy, as in StopConfig."""
    head: str | None = None
    """Name of the head, such as D3-w6: its folder in the run that trained it."""
    k: Few | None = None
    max_draft: Few = 20
    h: Fraction | None = None
    entropy: PositiveFloat | None = None
    confidence: Fraction | None = None
    cumulative: Fraction | None = None
    """This and those above: values of the stop policy, as in StopConfig; None where it has none."""
    sampling: dict[str, float] = {}
    """Temperature, top_k, top_p and min_p that it was chosen for; outputs are exact with others."""
    drafter: str | None = None
    """The drafter; in an export its model_type (spec-drafter, llama, ...)."""
    verifier: VerifierConfig = VerifierConfig()
    """The verifier; spec-verification applies to greedy decoding only."""
    method: DecodeConfig | None = None
    """A tree or cascade that is faster in the kind of decoding (greedy, sampled) of `sampling`."""
    speculate: bool = True
    """False if plain decoding was faster than all drafts in that kind of decoding."""
    batches: dict[Count, Policy] = {}
    """Policies for larger batch sizes, by batch size."""

    @model_validator(mode="after")
    def _check(self) -> Policy:
        """Raises ValueError if the value of the stop policy is missing, or a setting is unused."""
        value = STOPS[self.stop].varied
        if getattr(self, value) is None:
            raise ValueError(f"stop is {self.stop!r} but there is no {value}; add {value}")
        check_given("verifier", self.verifier, RULES)
        return self

    def at(self, batch_size: int) -> Policy:
        """Returns the policy for the largest measured batch size up to batch_size; else itself."""
        smaller = [size for size in self.batches if size <= batch_size]
        return self.batches[max(smaller)] if smaller else self

    def chosen_for(self, greedy: bool) -> bool:
        """Whether it was chosen for greedy (or else sampled) decoding."""
        return greedy == (self.sampling.get("temperature", 0.0) == 0.0)

    def stop_config(self) -> StopConfig:
        """Returns the stop policy as settings, without the head's folder, which is unknown here."""
        names = set(STOPS[self.stop].settings) - {"head"}
        return StopConfig(kind=self.stop, **self.model_dump(include=names, exclude_none=True))

    @property
    def rule(self) -> VerifierRule | None:
        """The row of the verifier; None for auto."""
        return RULES.get(self.verifier.kind)

    def verifier_for(self, greedy: bool) -> VerifierConfig:
        """Returns the verifier, or auto (lossless) if it is not valid for this kind of decoding."""
        valid = self.rule and self.rule.fits(greedy, "deterministic" if greedy else "iid")
        return self.verifier if valid else VerifierConfig()

    @property
    def lossy(self) -> bool:
        """Whether outputs with this policy may differ from the target's."""
        return self.rule is not None and not self.rule.lossless


def read_policy(file: Path) -> Policy:
    """Reads a policy.json. Raises ConfigError if it is invalid or lacks its policy's value."""
    try:
        return parse_policy(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}); `drafttrain tune` writes one"
        ) from None


def parse_policy(content: str | Mapping[str, Any], name: str = "policy") -> Policy:
    """Parses the content of a policy.json, text or values. Raises as `read_policy` does."""
    parse = Policy.model_validate_json if isinstance(content, str) else Policy.model_validate
    try:
        return parse(content)
    except ValidationError as error:
        raise ConfigError(
            f"{name} is no valid policy.json ({first_problem(error)}); `drafttrain tune` writes one"
        ) from None


def dump_policy(policy: Policy) -> dict[str, Any]:
    """Returns the policy as JSON values, without settings that it does not use."""
    nested = {"max_draft", "verifier", "method", "batches"}
    values = policy.model_dump(mode="json", exclude_defaults=True, exclude=nested)
    if "max_draft" in STOPS[policy.stop].settings or policy.head is not None:
        values["max_draft"] = policy.max_draft  # the head can still be used
    used = {"kind", *(policy.rule.settings if policy.rule else ())}
    values["verifier"] = policy.verifier.model_dump(include=used)
    if policy.method is not None:
        unset = {"exclude_none": True, "exclude_unset": True}
        values["method"] = policy.method.model_dump(mode="json", **unset)
    if policy.batches:
        values["batches"] = {str(size): dump_policy(each) for size, each in policy.batches.items()}
    return values
