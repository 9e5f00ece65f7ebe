"""policy.json: read, written, and turned into the stop policy that it describes."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from drafttrain.config import ConfigError, Policy
from drafttrain.decoding.stopping import Confidence, Entropy, FixedLength, HeadPolicy
from drafttrain.decoding.types import StopPolicy
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


def write_policy(policy: Policy, file: Path) -> None:
    file.write_text(policy.model_dump_json(indent=2, exclude_none=True) + "\n", encoding="utf-8")


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
