"""Comparison of scores and caches with an uncached forward pass over the whole path."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import EncoderDecoderCache, PreTrainedModel

from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.requests import ForwardOutput, ForwardRequest
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.types import Proposal, Source
from tests.comparing import close
from tests.decoding.paths import nodes_to, tokens_to
from tests.tiny_models import VOCAB, tiny_source

LENGTHS = (3, 9, 1, 6)
"""Lengths of the sources of a batch."""
TREE = Proposal(torch.tensor([8, 9, 8, 30, 11, 12, 13]), torch.tensor([-1, -1, 0, 0, 1, 3, 3]))
"""Two roots: the first has two children, the second of which has two; the second root has one."""


def fresh(model: PreTrainedModel, source: Source, tokens: list[int]):
    """Runs the model's own forward pass over the whole path, without an earlier cache."""
    inputs = {"input_ids": torch.tensor([tokens])}
    if model.config.is_encoder_decoder:
        own = {
            name: value[None].to(model.dtype) if value.is_floating_point() else value[None]
            for name, value in source.inputs.items()
        }
        inputs = own | {"decoder_input_ids": torch.tensor([tokens])}
    with torch.inference_mode():
        return model(**inputs, use_cache=True, output_hidden_states=True)


def sources_of(model: PreTrainedModel, lengths: Sequence[int] = LENGTHS) -> list[Source]:
    generator = torch.Generator().manual_seed(2)
    return [
        tiny_source(torch.randint(4, VOCAB, (length,), generator=generator), model)
        for length in lengths
    ]


def extend_all(
    model: CachedModel, batch: Sequence[tuple[SequenceState, Tensor]]
) -> list[ForwardOutput]:
    """Extends each cache to exactly these tokens, computing at least the last one, as drafters
    do."""
    return model.forward_batch(
        [ForwardRequest(state, state.align(tokens), logits_to_keep=1) for state, tokens in batch]
    )


def extend(model: CachedModel, state: SequenceState, tokens: Tensor) -> ForwardOutput:
    return extend_all(model, [(state, tokens)])[0]


def last_hidden(output) -> torch.Tensor:
    states = output.get("decoder_hidden_states") or output.hidden_states
    return states[-1][0]


def precision_of(model: PreTrainedModel) -> float:
    """Returns the tolerance; eager attention computes its softmax in float32, GPT-J its scores."""
    if model.dtype == torch.float32:
        return 1e-4
    config = model.config
    single = config._attn_implementation == "eager" or config.model_type == "gptj"
    return 1e-5 if single else 1e-10


def drafts(generator: torch.Generator, trees: bool = True) -> list[Proposal]:
    """Returns chains of several lengths, one of them empty, and a tree."""
    chains = [torch.randint(4, VOCAB, (size,), generator=generator) for size in (4, 0, 2)]
    return [*map(Proposal.chain, chains), TREE if trees else Proposal.chain(TREE.tokens)]


def check_rounds(target: CachedModel, sources: Sequence[Source]) -> None:
    """Asserts over several rounds of a batch that each node's logits and hidden state, and each
    sequence's cache after keeping a path or nothing, equal those of an uncached pass."""
    model, states = target.model, target.encode_all(sources)
    tokens = [source.prefix.tolist() for source in sources]
    generator, precision = torch.Generator().manual_seed(3), precision_of(model)
    for turn in range(4):
        proposals = drafts(generator, target.supports_tree_attention)
        proposals = proposals[turn:] + proposals[:turn]  # every sequence gets every draft once
        proposals = proposals[: len(sources)]
        committed = [torch.tensor(own) for own in tokens]
        scores = target.score([*zip(states, committed, proposals, strict=True)])
        for i, (proposal, score) in enumerate(zip(proposals, scores, strict=True)):
            count = len(proposal.tokens)
            for leaf in {-1, *range(count)} - set(proposal.parents.tolist()):
                nodes = nodes_to(proposal.parents, leaf)
                reference = fresh(model, sources[i], [*tokens[i], *tokens_to(proposal, leaf)])
                rows = [node + 1 for node in (-1, *nodes)]
                expected = reference.logits[0, -len(rows) :]
                close_rows(score.logits[rows], expected, precision)
                hidden = last_hidden(reference)[-len(rows) :]
                close_rows(score.hidden[-count - 1 :][rows], hidden, precision)
            kept = nodes_to(proposal.parents, min(2 * turn, count) - 1)
            target.keep(states[i], torch.tensor(kept, dtype=torch.long))
            tokens[i] += proposal.tokens[kept].tolist()
            assert (states[i].tokens, states[i].positions) == (tokens[i], [*range(len(tokens[i]))])
            caches = fresh(model, sources[i], tokens[i]).past_key_values
            close_caches(states[i], caches, precision)
            tokens[i].append(int(torch.randint(4, VOCAB, (), generator=generator)))


def close_rows(seen: Tensor, expected: Tensor, precision: float) -> None:
    """Asserts equality relative to the largest expected magnitude of each row."""
    spread = expected.abs().amax(dim=-1, keepdim=True)
    close(seen / spread, expected / spread, precision)


def close_caches(state: SequenceState, expected, precision: float = 1e-10) -> None:
    """Asserts that the keys and values of a sequence equal those of a Transformers cache."""
    if isinstance(expected, EncoderDecoderCache):
        for number, layer in enumerate(expected.cross_attention_cache.layers):
            close_layer(cross_keys_values(state, number), layer, precision)
        expected = expected.self_attention_cache
    for number, layer in enumerate(expected.layers):
        close_layer(state.keys_values([number], 0, state.cached)[:, None], layer, precision)


def close_layer(seen: Sequence[Tensor], layer, precision: float) -> None:
    for part, wanted in zip(seen, (layer.keys, layer.values), strict=True):
        if layer.is_sliding:  # Transformers keeps only the window's columns
            part = part[:, :, -wanted.shape[2] :]
        close(part, wanted, precision)


def cross_keys_values(state: SequenceState, layer: int) -> list[Tensor]:
    """Returns cross-attention keys and values in Transformers' layout, [1, heads, S, head_dim]."""
    held = state.kv_cache.sources(slice(state.row, state.row + 1), len(state.encoded))
    return held[2 * layer : 2 * layer + 2]


PATHS = [
    [5, 9, 17],  # only the prompt
    [5, 9, 17, 8, 30, 21, 6],  # all draft tokens accepted, and a bonus token
    [5, 9, 17, 8, 30, 21, 6],  # unchanged
    [5, 9, 17, 8, 11],  # some tokens rejected
    [5, 9, 17],  # back to the prompt
    [7, 9, 17, 22, 23],  # differs from the first token on
    [7, 9, 17, 22, 23, *range(4, 34)],
]
