"""A method from settings: drafter, stop policy and verifier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from drafttrain.build.drafts import build_drafter, level_names, tree_settings
from drafttrain.build.heads import open_head
from drafttrain.build.pairing import method_stop, rule_of
from drafttrain.build.pairs import Pair
from drafttrain.config.base import ConfigError
from drafttrain.config.decode import (
    DecodeConfig,
    SamplingConfig,
    StopConfig,
    TreeConfig,
    VerifierConfig,
)
from drafttrain.config.kinds import NONE, kind_of, named_kind
from drafttrain.config.methods import STOPS, TREES
from drafttrain.config.policy import DEFAULT_H, HEAD, POLICY
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Drafter, StopPolicy, Verifier
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import HeadPolicy, make_policy
from drafttrain.decoding.types import Sampling
from drafttrain.decoding.verifiers import make_verifier
from drafttrain.models.acceptance_head import AcceptanceHead
from drafttrain.models.drafters import vocabulary_size

AUTO, CHAINS = VerifierConfig(), TreeConfig()


@dataclass(frozen=True)
class Method:
    """A way to decode: drafter, stop policy, verifier."""

    drafter: Drafter
    stop: StopPolicy
    verifier: Verifier
    parameter_ratios: Mapping[str, float] = field(default_factory=dict)
    """Parameters over the target's, by drafter: one, or those whose calls are counted apart. Of
    several that draft side by side, their mean."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """What a sweep varies: k, h, ..., and the settings of the verifier."""
    label: str | None = None
    """A name for reports. Default: those of its three parts."""
    other: str | None = None
    """Which of `others` it is; None: the drafter that is measured."""
    called: str | None = None
    """What the user calls its drafter; None: by its kind."""
    kind: str = "chain"
    """What it is called in reports (`method_kind`)."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """depth: most levels of a draft (a chain's tokens); nodes: its most draft tokens, which the
    target scores at once. None of plain decoding."""
    assistant: PreTrainedModel | None = None
    """The (first) drafter's model, where it is a language model whose embedding has as many rows
    as the target's: Transformers' own assisted generation can draft with it."""
    parameters: int | None = None
    """Of all models that draft; None where it is not known."""

    @property
    def name(self) -> str:
        drafter = self.called or self.drafter.name
        return self.label or f"{drafter} {self.stop.name} {self.verifier.name}"

    def decoder(
        self,
        target: CachedModel,
        sampling: Sampling,
        seed: int,
        row: Callable[[int], int] = lambda number: number,
    ) -> Decoder:
        """A target decoded by this method. Sequence number i draws from the stream of its row."""
        return Decoder(
            target,
            self.drafter,
            self.stop,
            self.verifier,
            sampling,
            lambda number: sequence_randomness(seed, row(number), target.device),
        )


def build_sampling(config: SamplingConfig) -> Sampling:
    return Sampling(config.temperature, config.top_k, config.top_p, config.min_p)


def build_method(config: DecodeConfig, pair: Pair) -> Method:
    """Drafter, stop policy and verifier of settings that `check_methods` takes.

    Raises ValueError as `build_stop` and `build_drafter`.
    """
    sampling = build_sampling(config.sampling)
    verifier = build_verifier(config.verifier, sampling, config.tree)
    config = config.model_copy(update={"stop": method_stop(config)})
    model, target = pair.models[str(config.drafter)], pair.target.model
    drafter, stop = build_drafter(config, pair), build_stop(config, model)
    varied = {stop.rule.varied: float(stop.value)}
    varied |= {name: float(value) for name, value in verifier.settings.items()}
    models, ratios = [pair.models[name] for name in config.drafters], {}
    parameters = [0 if one is None else one.num_parameters() for one in models]
    if named_kind(config.drafter) is not NONE:
        sizes = [count / target.num_parameters() for count in parameters]
        ratios = {drafter.name: sum(sizes) / len(sizes)}
        if config.cascade is not None:
            ratios = dict(zip(level_names(config.drafters), sizes, strict=True))
    language_model = model is not None and kind_of(model.config).is_language_model
    fits = language_model and vocabulary_size(model.config) == vocabulary_size(target.config)
    return Method(
        drafter,
        stop,
        verifier,
        ratios,
        varied,
        kind=method_kind(config),
        sizes=tree_settings(config.tree, stop.longest) if ratios else {},
        assistant=model if fits else None,
        parameters=sum(parameters) if ratios else None,
    )


def build_verifier(
    config: VerifierConfig, sampling: Sampling, tree: TreeConfig = CHAINS
) -> Verifier:
    """The verifier asked for, as `rule_of`."""
    rule = rule_of(config, sampling.greedy, tree)
    return make_verifier(rule.name, *(getattr(config, name) for name in rule.settings))


def build_stop(decode: DecodeConfig, drafter: PreTrainedModel | None) -> StopPolicy:
    """The stop policy that the settings ask for; `drafter` is None for what is no model.

    What was not given is as policy.json says, else by the drafter's kind and the paper: a block
    drafter drafts as many slots as it was trained with. Raises ConfigError for a head that is
    missing or was trained for another drafter.
    """
    given, stop, found = decode.stop, STOPS[decode.stop.kind], None
    if not stop.requires:
        return make_stop(given)
    assert drafter is not None
    if stop.reads_head:
        found = open_head(str(decode.drafter), given.head, drafter, decode.sampling)
    policy = None if found is None else found.threshold
    values: dict[str, float] = {}
    if given.h is None:
        values["h"] = DEFAULT_H if policy is None or policy.h is None else policy.h
    if "max_draft" not in given.model_fields_set:
        if policy is not None:
            values["max_draft"] = policy.max_draft
        elif kind_of(drafter.config).drafts == "blocks":
            values["max_draft"] = drafter.config.k
    return make_stop(given.model_copy(update=values), found and found.head)


def make_stop(config: StopConfig, head: AcceptanceHead | None = None) -> StopPolicy:
    """The stop policy of settings that hold all it uses, and of its head where it has one.

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


def method_kind(config: DecodeConfig) -> str:
    """plain, chain, cascade, or the kind of tree."""
    if named_kind(config.drafter) is NONE:
        return "plain"
    if config.cascade is not None:
        return "cascade"
    return "chain" if TREES[config.tree.kind].shape is None else config.tree.kind
