"""Builds a decoding method (drafter, stop policy and verifier) from settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from drafttrain.build.drafts import build_drafter, level_names, tree_settings
from drafttrain.build.heads import open_head
from drafttrain.build.pairing import method_stop, rule_of
from drafttrain.build.pairs import Pair
from drafttrain.config.base import ConfigError
from drafttrain.config.decode import DecodeConfig, StopConfig, TreeConfig, VerifierConfig
from drafttrain.config.kinds import NONE, kind_of, named_kind
from drafttrain.config.methods import STOPS, TREES
from drafttrain.config.policy import DEFAULT_H, HEAD, POLICY
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Drafter, Randomness, StopPolicy, Verifier
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import HeadPolicy, make_policy
from drafttrain.decoding.types import Sampling
from drafttrain.decoding.verifiers import make_verifier
from drafttrain.models.acceptance_head import AcceptanceHead
from drafttrain.models.drafters import vocabulary_size

AUTO, CHAINS = VerifierConfig(), TreeConfig()


@dataclass(frozen=True)
class Method:
    """A decoding method: drafter, stop policy and verifier."""

    drafter: Drafter
    stop: StopPolicy
    verifier: Verifier
    parameter_ratios: Mapping[str, float] = field(default_factory=dict)
    """Parameters divided by the target's, by drafter name: one per cascade level, else one, for a
    tree the mean of its drafters."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Values that a sweep can vary: the stop policy's (k, h, ...) and the verifier's."""
    label: str | None = None
    """The name in reports; None: the names of its three parts."""
    other: str | None = None
    """Its name in `others`; None for a method of the measured drafter."""
    called: str | None = None
    """The user's name for its drafter; None: the name of the drafter's kind."""
    kind: str = "chain"
    """The kind of method in reports (`method_kind`)."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Maximal depth (levels) and nodes (draft tokens) of a draft. Empty for plain decoding."""
    assistant: PreTrainedModel | None = None
    """The (first) drafter's model if Transformers' assisted generation can use it."""
    parameters: int | None = None
    """Total parameters of all drafters; None if unknown."""

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
        """Returns a decoder of the target; sequence i uses the random stream of row(i)."""

        def randomness(number: int) -> Randomness:
            return sequence_randomness(seed, row(number), target.device)

        return Decoder(target, self.drafter, self.stop, self.verifier, sampling, randomness)


def build_method(config: DecodeConfig, pair: Pair) -> Method:
    """Builds a method from settings that `check_methods` has accepted.

    Raises ValueError as `build_stop` and `build_drafter` do.
    """
    sampling = Sampling.of(config.sampling)
    verifier = build_verifier(config.verifier, sampling, config.tree)
    config = config.model_copy(update={"stop": method_stop(config)})
    model, target = pair.models[str(config.drafter)], pair.target.model
    drafter, stop = build_drafter(config, pair), build_stop(config, model)
    varied = {stop.rule.varied: float(stop.value)}
    varied |= {name: float(value) for name, value in verifier.settings.items()}
    models, ratios = [pair.models[name] for name in config.drafters], {}
    parameters = [0 if each is None else each.num_parameters() for each in models]
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
    """Builds the verifier of `rule_of`."""
    rule = rule_of(config, sampling.greedy, tree)
    return make_verifier(rule.name, *(getattr(config, name) for name in rule.settings))


def build_stop(decode: DecodeConfig, drafter: PreTrainedModel | None) -> StopPolicy:
    """Builds the stop policy; `drafter` is None for drafters without a model.

    Defaults of h and max_draft: those of policy.json, else the paper's h and, for a block drafter,
    the slots it was trained with. Raises ConfigError for a missing head or one of another drafter.
    """
    given, stop, choice = decode.stop, STOPS[decode.stop.kind], None
    if not stop.requires:
        return make_stop(given)
    assert drafter is not None
    if stop.reads_head:
        choice = open_head(str(decode.drafter), given.head, drafter, decode.sampling)
    policy = None if choice is None else choice.threshold
    values: dict[str, float] = {}
    if given.h is None:
        values["h"] = policy.h if policy else DEFAULT_H
    if "max_draft" not in given.model_fields_set and policy:
        values["max_draft"] = policy.max_draft
    elif "max_draft" not in given.model_fields_set and kind_of(drafter.config).drafts == "blocks":
        values["max_draft"] = drafter.config.k
    return make_stop(given.model_copy(update=values), choice and choice.head)


def make_stop(config: StopConfig, head: AcceptanceHead | None = None) -> StopPolicy:
    """Builds a stop policy from complete settings. Raises ConfigError if its head is missing."""
    stop = STOPS[config.kind]
    value, most = getattr(config, stop.varied), getattr(config, stop.settings[-1])
    if not stop.reads_head:
        return make_policy(stop.name, value, most)
    if head is None:
        raise ConfigError(
            f"{POLICY} uses an acceptance head, but {HEAD}/ is missing; export the drafter with it"
        )
    return HeadPolicy(head, value, most)


def method_kind(config: DecodeConfig) -> str:
    """Returns plain, chain, cascade or the kind of tree."""
    if named_kind(config.drafter) is NONE:
        return "plain"
    if config.cascade is not None:
        return "cascade"
    return "chain" if TREES[config.tree.kind].shape is None else config.tree.kind
