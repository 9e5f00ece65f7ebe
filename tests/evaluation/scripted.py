"""A drafter that follows a script, so that tests know what it will be right about."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from drafttrain.build.pairs import Pair
from drafttrain.config.commands import EvalConfig
from drafttrain.config.decode import DecodeConfig, SamplingConfig
from drafttrain.config.inputs import DataConfig
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.target_states import TargetRequirements
from drafttrain.decoding.types import Proposal, Round, Sampling, Source
from drafttrain.evaluation.metrics import first_difference
from drafttrain.evaluation.prompts import Prompt
from drafttrain.evaluation.runner import decode_by, plain_method
from drafttrain.models.loading import LoadedTarget
from tests.tiny_models import EOS, PAD, UNK, VOCAB


class ScriptedDrafter:
    """Proposes the block written down for the source and the length of the prefix; -1: no token."""

    provides = frozenset()
    requires = TargetRequirements()
    drafts_trees = False

    def __init__(self, blocks: dict[tuple[int, ...], Tensor], name: str = "scripted"):
        self.blocks = blocks
        self.name = name

    def draw_kind(self, sampling: Sampling) -> str:
        return "deterministic"

    def open(self, source: Source, sampling: Sampling, randomness: object) -> ScriptedSession:
        return ScriptedSession(self.blocks[tuple(source.input_ids.tolist())], len(source.prefix))


class ScriptedSession:
    def __init__(self, blocks: Tensor, prefix: int):
        self.blocks = blocks
        self.prefix = prefix

    def propose(self, tokens: Tensor, target_state: object, stop) -> Proposal:
        block = self.blocks[len(tokens) - self.prefix]
        return Proposal.chain(block[block >= 0][: stop.longest])


def plain_tokens(model: PreTrainedModel, ids: list[int], max_new_tokens: int) -> list[int]:
    """The target's own greedy output."""
    prompt = Prompt(0, "", None, make_source(ids, model))
    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    [output] = decode_by(CachedModel(model), plain_method(sampling), sampling, [prompt])
    return output.tokens


def noisy_blocks(tokens: list[int], k: int, wrong: float, seed: int) -> Tensor:
    """Blocks at every prefix of an output, each token wrong with some probability. [L, k]."""
    generator = torch.Generator().manual_seed(seed)
    padded = torch.tensor([*tokens, *[7] * k])
    blocks = torch.stack([padded[p : p + k] for p in range(len(tokens))])
    noise = torch.randint(2, VOCAB, blocks.shape, generator=generator)
    return torch.where(torch.rand(blocks.shape, generator=generator) < wrong, noise, blocks)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words w2 .. w39 are tokens 2 .. 39."""
    words = {"<pad>": PAD, "</s>": EOS, "<unk>": UNK}
    words |= {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def loaded(model: PreTrainedModel) -> Pair:
    """The model as a target, without a drafter."""
    target = LoadedTarget(model=model, tokenizer=word_tokenizer(), path="models/tiny")
    return Pair(target, CachedModel(model), {}, {})


def rows(texts: Sequence[str]) -> Dataset:
    """Inputs without references."""
    missing = [None] * len(texts)
    columns = {"row": range(len(texts)), "source": texts, "reference": missing, "reason": missing}
    return Dataset.from_dict(columns)


def options(temperature: float = 0.0, max_new_tokens: int = 12, seed: int = 0, **given: object):
    """Settings of `drafttrain eval`."""
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    given = {"data": DataConfig(path="data/tiny.txt")} | given
    return EvalConfig(decode=DecodeConfig(sampling=sampling), **given)


def replay_rounds(
    predicted: Tensor,
    reference: Sequence[int],
    max_new_tokens: int | None = None,
) -> list[Round]:
    """The rounds of greedy verification along a known output.

    A round at prefix p drafts predicted[p], accepts its longest common beginning with
    reference[p:], and emits one token more: the correction, or the bonus. EOS is the last token
    of the reference; a draft that contains it ends the output without a bonus. With max_new_tokens,
    drafts leave room for that one token, as the decoding loop does. A draft ends before a token -1
    and after EOS.

    Shapes: predicted [P, k], P >= number of reference tokens; reference [L] with its EOS.
    """
    reference = [int(token) for token in reference]
    rounds: list[Round] = []
    start = 0
    while start < len(reference):
        block = predicted[start].tolist()
        block = block[: block.index(-1)] if -1 in block else block
        block = block[: block.index(EOS) + 1] if EOS in block else block
        if max_new_tokens is not None:
            block = block[: max_new_tokens - start - 1]
        block = block[: block.index(EOS) + 1] if EOS in block else block
        wrong = first_difference(block, reference[start:])
        accepted = len(block) if wrong is None else wrong
        emitted = reference[start : start + accepted + 1]
        start += len(emitted)
        passes, finished = int(len(block) > 0), start == len(reference)
        path = range(accepted)
        rounds.append(Round(0, block, path, emitted, passes, finished=finished))
    return rounds
