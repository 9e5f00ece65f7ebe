"""policy.json: read, written, and turned into the stop policy and verifier that it describes.

    {"drafter": "spec-drafter", "stop": "fixed", "k": 10, "verifier": {"kind": "auto"}}

is the whole triple: what proposes, when a round of drafting ends, what is accepted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from drafttrain.config.base import ConfigError
from drafttrain.config.policy import Policy
from drafttrain.decoding.stopping import Confidence, Entropy, FixedLength, HeadPolicy
from drafttrain.decoding.types import Sampling, StopPolicy, Verifier
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling, SpecVerification
from drafttrain.models.acceptance_head import AcceptanceHead

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
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(
            f"{file}: {where}: {first['msg']}; write it anew with `drafttrain tune`"
        ) from None
    check_policy(policy, str(file))
    return policy


def check_policy(policy: Policy, name: str) -> None:
    """A policy must hold the one value that its kind goes by. Raises ConfigError."""
    field = {"fixed": "k", "head": "h"}.get(policy.stop, policy.stop)
    if getattr(policy, field) is None:
        raise ConfigError(f"{name}: stop is {policy.stop!r} but there is no {field}; add {field}")
    rule = policy.verifier
    given = sorted(rule.model_fields_set & {"beta", "tau"})
    if given and rule.kind != "spec-verification":
        raise ConfigError(
            f"{name}: verifier.{given[0]} = {getattr(rule, given[0])} counts for spec-verification "
            f"only, but verifier.kind is {rule.kind!r}; leave it out, or change the kind"
        )


def dump_policy(policy: Policy) -> dict[str, Any]:
    """The policy as JSON values, without what its stop or its verifier does not go by."""
    values = policy.model_dump(mode="json", exclude_none=True)
    if policy.stop == "fixed" and policy.head is None:  # a head may still be asked for
        del values["max_draft"]
    if policy.verifier.kind != "spec-verification":
        values["verifier"] = {"kind": policy.verifier.kind}
    if not policy.sampling:
        del values["sampling"]
    return values


def write_policy(policy: Policy, file: Path) -> None:
    text = json.dumps(dump_policy(policy), indent=2, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def policy_verifier(policy: Policy, sampling: Sampling) -> Verifier:
    """The verifier of a policy, for decoding of this kind.

    `auto`, and any rule that is for the other kind of decoding only, is the lossless one: greedy
    match at temperature 0, rejection sampling above.
    """
    rule = policy.verifier
    if rule.kind == "rejection" or not sampling.greedy:
        return RejectionSampling()
    if rule.kind == "spec-verification":
        return SpecVerification(rule.beta, rule.tau)
    return GreedyMatch()


def is_lossy(policy: Policy) -> bool:
    """Whether greedy decoding under the policy may differ from the target's own."""
    return policy.verifier.kind == "spec-verification"


def stop_policy(policy: Policy, head: AcceptanceHead | None) -> StopPolicy:
    """The stop policy that a checked policy describes. Raises ConfigError where its head lacks."""
    if policy.stop == "fixed":
        assert policy.k is not None
        return FixedLength(policy.k)
    if policy.stop == "entropy":
        assert policy.entropy is not None
        return Entropy(policy.entropy, policy.max_draft)
    if policy.stop == "confidence":
        assert policy.confidence is not None
        return Confidence(policy.confidence, policy.max_draft)
    assert policy.h is not None
    if head is None:
        raise ConfigError(
            f"{POLICY} stops by an acceptance head, but there is none in {HEAD}/; export the "
            "drafter with its head"
        )
    return HeadPolicy(head, policy.h, policy.max_draft)
