"""Stop policies from settings."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.build.heads import HeadChoice, find_head, open_head, warn_of_other_sampling
from drafttrain.build.policy import DEFAULT_H, HEAD, POLICY
from drafttrain.config.base import ConfigError
from drafttrain.config.decode import DecodeConfig, StopConfig
from drafttrain.config.kinds import kind_of, named_kind
from drafttrain.config.policy import Policy
from drafttrain.config.stops import STOPS
from drafttrain.config.trees import TREES
from drafttrain.decoding.roles import StopPolicy
from drafttrain.decoding.stopping import HeadPolicy, make_policy
from drafttrain.decoding.types import Sampling
from drafttrain.models.acceptance_head import AcceptanceHead
from drafttrain.models.drafters import read_drafter_settings


def check_stop(decode: DecodeConfig) -> None:
    """Refuse a stop policy that cannot be right, before any large model is loaded.

    Raises ConfigError for settings that another kind of policy goes by, a draft that does not show
    what it goes by, a head that is missing or reads other states than the drafter has; ValueError
    for a policy that would bias sampling.
    """
    check_given(decode.stop)
    stop, tree = STOPS[decode.stop.kind], TREES[decode.tree.kind]
    if stop.requires and named_kind(decode.drafter) is not None:
        raise ConfigError(
            f"stop.kind = {stop.name!r}, but drafter {decode.drafter!r} has no rows or "
            "states that it could go by; leave --stop out, or give a trained drafter"
        )
    if "expected" in stop.requires - tree.provides:
        trees = [one.name for one in TREES.values() if "expected" in one.provides]
        raise ConfigError(
            f"stop.kind = {stop.name!r} goes by the expected acceptance of an {trees[0]}, but the "
            f"tree is {tree.name!r}; leave --stop out, or set tree.kind={trees[0]}"
        )
    if tree.shape is not None and not stop.takes_trees:
        raise ConfigError(
            f"stop.kind = {stop.name!r} stops chains, but the drafts are trees "
            f"({tree.name}); use --stop fixed, or gain with an opt-tree"
        )
    if stop.reads_head:
        drafter = str(decode.drafter)
        find_head(decode.stop.head, drafter, read_drafter_settings(drafter))
    else:
        make_stop(decode.stop).check_sampling(Sampling(decode.sampling.temperature))


def check_given(config: StopConfig) -> None:
    """Refuse settings that another kind of policy goes by. Raises ConfigError."""
    known = {"kind", *STOPS[config.kind].settings}
    for name in sorted(config.model_fields_set - known):
        kinds = [stop.name for stop in STOPS.values() if name in stop.settings]
        raise ConfigError(
            f"stop.{name} = {getattr(config, name)} counts for stop policy {' or '.join(kinds)} "
            f"only, but it is {config.kind!r}; leave it out, or add --stop {kinds[-1]}"
        )


def build_stop(decode: DecodeConfig, drafter: PreTrainedModel | None) -> StopPolicy:
    """The stop policy that the settings ask for; `drafter` is None for what is no model.

    Raises ConfigError as `check_stop`, and for a head that was trained for another drafter. A head
    whose labels were made for other sampling is used, with a warning: its stops are as exact.
    """
    check_stop(decode)
    if not STOPS[decode.stop.kind].requires:
        return make_stop(decode.stop)
    assert drafter is not None
    found: HeadChoice | None = None
    if STOPS[decode.stop.kind].reads_head:
        found = open_head(str(decode.drafter), decode.stop.head, drafter)
        warn_of_other_sampling(found, decode.sampling)
    policy = None if found is None else found.policy
    filled = _fill(decode.stop, policy, drafter.config)
    return make_stop(filled, None if found is None else found.head)


def make_stop(config: StopConfig, head: AcceptanceHead | None = None) -> StopPolicy:
    """The stop policy of settings that hold all it goes by, and of its head where it has one.

    Raises ConfigError where the head is missing.
    """
    stop = STOPS[config.kind]
    if stop.reads_head and head is None:
        raise ConfigError(
            f"{POLICY} stops by an acceptance head, but there is none in {HEAD}/; export the "
            "drafter with its head"
        )
    value, most = getattr(config, stop.varied), getattr(config, stop.settings[-1])
    if stop.reads_head and head is not None:
        return HeadPolicy(head, value, most)
    return make_policy(stop.name, value, most)


def _fill(config: StopConfig, policy: Policy | None, drafter: PretrainedConfig) -> StopConfig:
    """What was not given: as policy.json says, else by the drafter's kind and the paper.

    A block drafter drafts as many slots as it was trained with.
    """
    values: dict[str, float] = {}
    if config.h is None:
        values["h"] = DEFAULT_H if policy is None or policy.h is None else policy.h
    if "max_draft" not in config.model_fields_set:
        if policy is not None:
            values["max_draft"] = policy.max_draft
        elif kind_of(drafter).drafts == "blocks":
            values["max_draft"] = drafter.k
    return config.model_copy(update=values)
