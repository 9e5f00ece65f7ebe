"""Tiny pairs, inputs and settings as `drafttrain eval` loads them."""

from collections.abc import Sequence

from datasets import Dataset
from transformers import PreTrainedModel

from drafttrain.build.method import Method
from drafttrain.build.pairs import Pair
from drafttrain.config.commands import EvalConfig
from drafttrain.config.decode import DecodeConfig, SamplingConfig
from drafttrain.config.inputs import DataConfig
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.verifiers import GreedyMatch
from drafttrain.evaluation.prompts import Prompt
from drafttrain.evaluation.runner import decode_by, plain_method
from drafttrain.models.loading import LoadedTarget
from tests.tiny_targets import tiny_tokenizer

MATCH = GreedyMatch()


def plain_tokens(model: PreTrainedModel, ids: list[int], max_new_tokens: int) -> list[int]:
    """Returns the target's greedy output."""
    prompt = Prompt(0, "", None, make_source(ids, model))
    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    [output] = decode_by(CachedModel(model), plain_method(sampling), sampling, [prompt])
    return output.tokens


def loaded(model: PreTrainedModel) -> Pair:
    """Returns a pair with the model as target and no drafter."""
    target = LoadedTarget(model=model, tokenizer=tiny_tokenizer(end=False), path="models/tiny")
    return Pair(target, CachedModel(model), {}, {})


def chain(model: PreTrainedModel, k: int = 3, verifier=MATCH, **facts: object) -> Method:
    """Returns the method of a language model that drafts k tokens."""
    drafter = CausalDrafter(CachedModel(model))
    return Method(drafter, FixedLength(k), verifier, assistant=model, **facts)


def rows(texts: Sequence[str], references: Sequence[str | None] | None = None) -> Dataset:
    """Returns usable inputs, numbered from 10."""
    count = len(texts)
    columns = {"row": range(10, 10 + count), "source": texts, "reason": [None] * count}
    return Dataset.from_dict(columns | {"reference": references or [None] * count})


def options(temperature: float = 0.0, max_new_tokens: int = 12, seed: int = 0, **given: object):
    """Returns settings of `drafttrain eval`."""
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    given = {"data": DataConfig(path="data/tiny.txt")} | given
    return EvalConfig(decode=DecodeConfig(sampling=sampling), **given)
