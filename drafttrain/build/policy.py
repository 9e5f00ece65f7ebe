"""policy.json: read, checked, written, and as the settings that stop policy and verifier are of.

    {"drafter": "spec-drafter", "stop": "fixed", "k": 10, "verifier": {"kind": "auto"}}

is the whole triple: what proposes, when a round of drafting ends, what is accepted. A `method`
beside it is the tree or cascade that is faster, for programs that can decode with one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from drafttrain.config.base import ConfigError
from drafttrain.config.decode import VerifierConfig, check_given
from drafttrain.config.policy import Policy
from drafttrain.config.stops import STOPS
from drafttrain.config.verifiers import RULES
from drafttrain.decoding.types import Sampling

POLICY = "policy.json"
HEAD = "acceptance_head"
"""Folder of the head in an export."""
DEFAULT_H = 0.7
"""Best in the paper (SpecDec++ Section 4), for heads without a policy.json."""


def read_policy(file: Path) -> Policy:
    """A policy.json. Raises ConfigError for a file that is none, or lacks its policy's value."""
    try:
        policy = Policy.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}); `drafttrain tune` writes one"
        ) from None
    except ValidationError as error:
        raise ConfigError(
            f"{file}: {_first_error(error, 'the file')}; write it anew with `drafttrain tune`"
        ) from None
    check_policy(policy, str(file))
    return policy


def parse_policy(values: Mapping[str, Any]) -> Policy:
    """The content of a policy.json, given as values. Raises ConfigError as `read_policy`."""
    try:
        policy = Policy.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            f"policy: {_first_error(error, 'it')}; write it as policy.json is"
        ) from None
    check_policy(policy, "policy")
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
    values = policy.model_dump(mode="json", exclude_none=True)
    if "max_draft" not in STOPS[policy.stop].settings and policy.head is None:
        del values["max_draft"]  # a head may still be asked for, where there is one
    rule = RULES.get(policy.verifier.kind)
    known = {"kind", *(() if rule is None else rule.settings)}
    values["verifier"] = {name: v for name, v in values["verifier"].items() if name in known}
    if policy.method is not None:
        values["method"] = policy.method.model_dump(
            mode="json", exclude_none=True, exclude_unset=True
        )
    if policy.speculate:
        del values["speculate"]
    if not policy.sampling:
        del values["sampling"]
    values["batches"] = {str(size): dump_policy(own) for size, own in policy.batches.items()}
    if not policy.batches:
        del values["batches"]
    return values


def write_policy(policy: Policy, file: Path) -> None:
    text = json.dumps(dump_policy(policy), indent=2, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def verifier_config(policy: Policy, sampling: Sampling) -> VerifierConfig:
    """The verifier of a policy, for decoding of this kind.

    `auto`, the lossless one, takes the place of a rule that is for another kind of decoding.
    """
    rule = RULES.get(policy.verifier.kind)
    draw_kind = "deterministic" if sampling.greedy else "iid"
    if rule is None or not rule.fits(sampling.greedy, draw_kind):
        return VerifierConfig()
    return policy.verifier


def is_lossy(policy: Policy) -> bool:
    """Whether decoding under the policy may differ from the target's own: greedy decoding, and
    sampling where its rule is not for greedy decoding only."""
    rule = RULES.get(policy.verifier.kind)
    return rule is not None and not rule.lossless


def _first_error(error: ValidationError, whole: str) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or whole
    return f"{where}: {first['msg']}"
