"""Probe of a model on a few tokens, before anything is decoded with it.

It compares the engine's logits for chains and trees with the model's own forward without a cache.
Some families use only the last input token, attend to later tokens, or count positions per call.
"""

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.decoding.engine.architectures import encoder_width, unwrapped
from drafttrain.decoding.engine.encoding import Encoder
from drafttrain.decoding.engine.forward import EncoderOutput
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.types import NotFinite, Proposal, Source

TOKENS = 8
"""Length of the probed path."""
TREE = torch.tensor([-1, 0, 0, 1])
"""Parents of the probed tree: a root with two children, the first of which has one child."""
PATHS = ([0], [0, 1], [0, 2], [0, 1, 3])
"""Nodes of the path to each node of the tree."""


@torch.inference_mode()
def probe(target: Any, trees: bool) -> str | None:
    """Returns why a `CachedModel` does not work with its engine; None: it works.

    It drafts, keeps a part of the draft and drafts again. An error in the model's own code is a
    reason too. Raises NotFinite for NaN logits.
    """
    model, size = target.model, target.model.get_input_embeddings().num_embeddings
    if target.position_limit is not None and target.position_limit < TOKENS:
        return None
    ids = (torch.arange(2 + TOKENS, device=target.device) + size // 2) % size
    source = make_source(ids[:2], model)
    if model.config.is_encoder_decoder:
        encoded = torch.linspace(-1, 1, 3 * encoder_width(model), device=target.device)
        source = replace(source, encoded=encoded.view(3, -1).to(model.dtype))
    path = torch.cat([source.prefix, ids[2:]])[:TOKENS]
    try:
        return _compare(target, source, path, trees)
    except NotFinite:
        raise
    except Exception as error:  # a model's own code may raise anything
        return f"its forward fails ({type(error).__name__}: {error})"


def _compare(target: Any, source: Source, path: Tensor, trees: bool) -> str | None:
    model, length = target.model, len(source.prefix)
    expected = reference_logits(model, source, path)
    if (expected.isnan() | expected.isposinf()).any():
        raise NotFinite(
            f"{model.name_or_path!r} gives NaN or infinite logits in {model.dtype}; "
            "load it in float32 or bfloat16, or train it again"
        )
    early = reference_logits(model, source, path[:length])
    if not _close(early[-1:], expected[length - 1 : length], target):
        return "its logits depend on later tokens (it looks ahead, or quantises per call)"
    state = target.encode(source)
    target.score([(state, path[:length], Proposal.chain(path[-3:]))])
    target.keep(state, torch.arange(0))
    target.score([(state, path[: length + 1], Proposal.chain(path[length + 1 : length + 4]))])
    target.keep(state, torch.arange(1))
    start = length + 3
    [chain] = target.score([(state, path[:start], Proposal.chain(path[start:]))])
    target.keep(state, torch.arange(len(path) - start - 1))
    # some families compute a single token differently
    [last] = target.score([(state, path, Proposal.empty())])
    logits = torch.cat([chain.logits, last.logits])
    if not _close(logits, torch.cat([expected[start - 1 :], expected[-1:]]), target):
        return "its logits with a cache differ from those without"
    return _compare_tree(target, source, path[:length]) if trees else None


def _compare_tree(target: Any, source: Source, prefix: Tensor) -> str | None:
    size = target.model.get_input_embeddings().num_embeddings
    nodes = (prefix.new_tensor([3, 4, 5, 6]) + size // 3) % size
    [tree] = target.score([(target.encode(source), prefix, Proposal(nodes, TREE))])
    for row, path in zip(tree.logits[1:], PATHS, strict=True):
        expected = reference_logits(target.model, source, torch.cat([prefix, nodes[path]]))
        if not _close(row[None], expected[-1:], target):
            return "the logits of tree nodes differ from those of their paths"
    return None


def reference_logits(model: PreTrainedModel, source: Source, tokens: Tensor) -> Tensor:
    """Returns the logits [T, V] after each token by the model's own forward without a cache."""
    inputs = {"input_ids": tokens[None]}
    if "position_ids" in inspect.signature(type(unwrapped(model)).forward).parameters:
        # those of `generate`; RoBERTa's default positions start at another number
        inputs["position_ids"] = torch.arange(len(tokens), device=tokens.device)[None]
    if model.config.is_encoder_decoder:
        [encoded] = Encoder(model)([source])
        states = EncoderOutput(last_hidden_state=encoded[None])
        inputs = {"decoder_input_ids": tokens[None], "encoder_outputs": states}
    return model(**inputs, use_cache=False).logits[0]


def _close(logits: Tensor, expected: Tensor, target: Any) -> bool:
    """Whether logits agree within 2 % of their standard deviation, in half precision 40 %, because
    calls of different lengths round differently (SmolLM2-135M in bfloat16: by up to 19 %, wrong
    masks by 70 % or more). Minus infinity must be equal."""
    width = min(logits.shape[1], expected.shape[1])
    compared = slice(width) if target.draftable is None else target.draftable
    logits, expected = logits[:, compared].float(), expected[:, compared].float()
    if logits.shape != expected.shape:  # it scores only its last token
        return False
    share = 0.4 if target.model.dtype in (torch.bfloat16, torch.float16) else 0.02
    spread = float(expected[expected.isfinite()].std(correction=0))
    return torch.allclose(logits, expected, rtol=0.02, atol=share * spread)
