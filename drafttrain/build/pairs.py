"""Load a target with drafters for it, checked against each other before weights are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.build.drafters import check_for_target, make_drafter, open_kind
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.kinds import DrafterKind, kind_of, named_kind
from drafttrain.data.bigrams import read_bigrams
from drafttrain.decoding.engine.architectures import check_configuration
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.roles import Drafter
from drafttrain.models.drafters import load_drafter, vocabulary_size
from drafttrain.models.loading import LoadedTarget, check_target, choose_device, load_target
from drafttrain.models.prompts import prompt_layers

CheckedDrafters = tuple[dict[str, PretrainedConfig], list[int] | None]
"""Settings of drafters by name, and the table of max-gram: what `check_pair` gives."""


@dataclass(frozen=True)
class Pair:
    """A target and a drafter for it, loaded."""

    target: LoadedTarget
    model: CachedModel
    """The target as the engine runs it; made once, as that tries a call."""
    drafter: Drafter
    drafter_model: PreTrainedModel | None
    """None where the drafter is no model."""
    companions: Mapping[str, Drafter] = field(default_factory=dict)
    """More drafters by their path: beside the first one, behind it in a cascade, or instead."""
    models: Mapping[str, PreTrainedModel | None] = field(default_factory=dict)
    """The companions' models."""
    table: Sequence[int] | None = None
    """Likeliest successors, where max-gram has them."""

    @property
    def kind(self) -> DrafterKind | None:
        """The drafter's; None for what no settings name."""
        if self.drafter_model is None:
            return named_kind(self.drafter.name)
        return kind_of(self.drafter_model.config)

    @property
    def language_model(self) -> PreTrainedModel | None:
        """The drafter's model, where it is a language model that other programs could draft with:
        it reads prompts itself, and its embedding has as many rows as the target's."""
        kind, model = self.kind, self.drafter_model
        if model is None or kind is None or not kind.is_language_model:
            return None
        sizes = {vocabulary_size(one.config) for one in (model, self.target.model)}
        return None if prompt_layers(model.config) or len(sizes) > 1 else model

    def parameters(self, beside: Sequence[str] = ()) -> int | None:
        """Parameters of the drafter and of these companions; None for plain decoding."""
        if self.kind is not None and self.kind.drafts == "nothing":
            return None
        models = [self.drafter_model, *(self.models[name] for name in beside)]
        return sum(model.num_parameters() for model in models if model is not None)

    def parameter_ratio(self, beside: Sequence[str] = ()) -> float | None:
        """A drafter's parameters over the target's; None for plain decoding.

        beside: companions that draft side by side with the drafter. The mean over all of them is
        what a call costs: each makes calls of its own.
        """
        count = self.parameters(beside)
        size = self.target.model.num_parameters()
        return None if count is None else count / (1 + len(beside)) / size

    def companion_ratio(self, name: str) -> float:
        """A companion's parameters over the target's; 0 for max-gram."""
        return self.led_by(name).parameter_ratio()

    def led_by(self, drafter: str) -> Pair:
        """The same, with a companion as the first drafter."""
        return replace(self, drafter=self.companions[drafter], drafter_model=self.models[drafter])


def load_pair(
    target: TargetConfig,
    drafter: str,
    companions: Sequence[str] = (),
    bigrams: str | None = None,
) -> Pair:
    """Target and drafters, checked against each other before the weights of any are read.

    bigrams: the table of max-gram, wherever it drafts. Raises ConfigError for drafters of another
    kind or vocabulary, and ValueError for families that the engine cannot run.
    """
    checked = check_pair(target, (drafter, *companions), bigrams)
    return open_pair(load_target(target), drafter, companions, checked)


def open_pair(
    target: LoadedTarget, drafter: str, companions: Sequence[str], checked: CheckedDrafters
) -> Pair:
    """A loaded target with its drafters, which `check_pair` has found to fit it.

    Raises ConfigError for weights that cannot be read, or of a drafter of another target's states.
    """
    settings_of, table = checked
    drafters: dict[str, Drafter] = {}
    models: dict[str, PreTrainedModel | None] = {}
    for name in (drafter, *companions):
        kind = named_kind(name)
        models[name] = None if kind else load_drafter(name, settings_of[name], target)
        if kind is None:
            drafters[name] = make_drafter(models[name], target.model)
        else:
            copied = table if kind.drafts == "copies" else None
            drafters[name] = open_kind(kind, copied, target.model)
    model = CachedModel(target.model)
    return Pair(target, model, drafters.pop(drafter), models.pop(drafter), drafters, models, table)


def check_pair(
    target: TargetConfig, drafters: Sequence[str], bigrams: str | None = None
) -> CheckedDrafters:
    """Settings of the drafters that are models, fit for the target's; max-gram's table.

    Raises as `load_pair`; no weights are read.
    """
    choose_device(target.device)
    target_settings = check_target(target)
    check_configuration(target_settings)
    table = None
    if bigrams is not None:
        table = read_bigrams(bigrams, target_settings.get_text_config(decoder=True).vocab_size)
    settings_of = {
        name: check_for_target(name, target, target_settings)
        for name in drafters
        if named_kind(name) is None
    }
    return settings_of, table
