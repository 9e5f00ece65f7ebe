"""Verifiers from settings: the rule asked for, or the one that goes with the drafts."""

from __future__ import annotations

from drafttrain.config.base import ConfigError
from drafttrain.config.decode import TreeConfig, VerifierConfig
from drafttrain.config.trees import TREES
from drafttrain.config.verifiers import GREEDY, RULES
from drafttrain.decoding.roles import Verifier
from drafttrain.decoding.types import Sampling
from drafttrain.decoding.verifiers import make_verifier

CHAINS = TreeConfig()
AUTO = VerifierConfig()


def build_verifier(
    config: VerifierConfig, sampling: Sampling, tree: TreeConfig = CHAINS
) -> Verifier:
    """The verifier asked for; `auto` is greedy match at temperature 0, above it the drafts' rule.

    Raises ConfigError as `check_settings`, and ValueError where the rule does not fit the sampling.
    """
    check_settings(config)
    name = config.kind
    if name == "auto":
        name = GREEDY.name if sampling.greedy else sampled_rule(tree)
    values = [getattr(config, setting.name) for setting in RULES[name].settings]
    verifier = make_verifier(name, *values)
    verifier.check_sampling(sampling)
    return verifier


def sampled_rule(tree: TreeConfig) -> str:
    """What verifies these drafts where tokens are sampled and no rule is asked for."""
    kind = TREES[tree.kind]
    return kind.rule_of_several if tree.drafters and kind.rule_of_several else kind.rule


def check_settings(config: VerifierConfig) -> None:
    """Refuse settings that another rule goes by. Raises ConfigError."""
    rule = RULES.get(config.kind)
    known = () if rule is None else (setting.name for setting in rule.settings)
    for name in sorted(config.model_fields_set - {"kind", *known}):
        rules = [
            one.name for one in RULES.values() if name in (setting.name for setting in one.settings)
        ]
        raise ConfigError(
            f"verifier.{name} = {getattr(config, name)} counts for {' or '.join(rules)} only, but "
            f"the verifier is {config.kind!r}; leave it out, or add --verifier {rules[0]}"
        )
