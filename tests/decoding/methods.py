"""The drafters of all methods for tiny models: one table for all laws of decoding."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from drafttrain.build.pairs import make_drafter
from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.drafters.block_heads import BlockHeadsDrafter
from drafttrain.decoding.drafters.cascade import Level, cascade
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.tree import SeveralDrafters, TreeDrafter
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.trees.chosen import Optimal
from drafttrain.decoding.trees.drawn import Beam, Branching, Paths
from drafttrain.decoding.trees.shapes import Shape
from tests.tiny_drafters import block_heads, drafter_of, state_drafter
from tests.tiny_models import near_copy

Copy = Callable[[PreTrainedModel, int], PreTrainedModel]
"""(target, seed) -> a model that drafts for the target."""
Make = Callable[[PreTrainedModel, Copy], Drafter]


def near(target: PreTrainedModel, seed: int) -> PreTrainedModel:
    return near_copy(target, 0.1, seed=seed)


def with_rows(rows: int, target: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Returns a noisy copy of a Llama with another number of embedding rows; additional rows are
    likely to be drafted."""
    other = type(target)(type(target.config)(**target.config.to_dict() | {"vocab_size": rows}))
    state = {name: value.clone() for name, value in near_copy(target, 0.3, seed).named_parameters()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        further = 3.0 * torch.randn(max(rows - len(state[name]), 0), state[name].shape[1])
        state[name] = torch.cat([state[name][:rows], further.to(state[name])])
    other = other.double().eval()
    other.load_state_dict(state)
    other.generation_config = target.generation_config
    return other


def causal(target: PreTrainedModel, copy: Copy, seed: int = 1) -> Drafter:
    return make_drafter(copy(target, seed), target)


def few_tokens(target: PreTrainedModel, copy: Copy) -> Drafter:
    """Returns a drafter of two of its tokens, including the last."""
    model = copy(target, 1)
    model.config.draftable_tokens = [1, model.config.vocab_size - 1]
    return make_drafter(model, target)


def masks(target: PreTrainedModel, copy: Copy) -> Drafter:
    """Returns a drafter whose mask is its last token."""
    model = copy(target, 1)
    model.config.pard_token, model.config.k = model.config.vocab_size - 1, 4
    return make_drafter(model, target)


def heads(target: PreTrainedModel, copy: Copy) -> Drafter:
    return BlockHeadsDrafter(block_heads(vocab_size=target.config.vocab_size), target)


def state(mode: str) -> Make:
    return lambda target, copy: make_drafter(state_drafter(target, [0, 1], mode), target)


def slots(**settings: object) -> Make:
    return lambda target, copy: BlockDrafter(drafter_of(target, **settings))


def tree(shape: Shape, over: Make = causal) -> Make:
    return lambda *given: TreeDrafter(over(*given), shape)


def several(*given: object) -> Drafter:
    return SeveralDrafters([TreeDrafter(causal(*given, seed=seed), Paths(1)) for seed in (1, 2)])


def levels(matrix: Sequence[Sequence[int]], *names: str, leniency: float = 1.0) -> Make:
    """Returns a cascade of methods of the table."""
    return lambda *given: cascade(
        [Level(name, METHODS[name](*given)) for name in names], matrix, leniency
    )


REVIEWED, IN_TURN = [[3, 2, 0], [3, 1], [0]], [[1, 4, 2], [0, 0], [0]]
"""A language model reviews blocks; or it drafts a token, a block follows, then copies."""
CHAINS: dict[str, Make] = {
    "plain": lambda *_: NoDrafter(),
    "causal": causal,
    "second": partial(causal, seed=2),
    "few tokens": few_tokens,
    "copies": lambda *_: MaxGramDrafter(),
    "heads": heads,
    "cascade": levels([[1, 1, 2], [2, 1], [2]], "causal", "second", "copies", leniency=1.5),
    "models in turn": levels([[1, 3], [0]], "causal", "second"),
    "heads reviewed": levels(REVIEWED, "causal", "heads", "copies"),
    "heads in turn": levels(IN_TURN, "causal", "heads", "copies"),
}
TREES: dict[str, Make] = {
    "opt-tree": tree(Optimal(6)),
    "rsd-c": tree(Branching((2, 1))),
    "rsd-s": tree(Beam(3)),
    "paths": tree(Paths(2)),
    "several": several,
}
DECODERS: dict[str, Make] = {
    "masks": masks,
    "masks reviewed": levels(REVIEWED, "causal", "masks", "copies"),
    "masks in turn": levels(IN_TURN, "causal", "masks", "copies"),
    "opt-tree over masks": tree(Optimal(6), masks),
    "state": state("blocks"),
    "linked state": state("linked"),
    "state, then copies": levels([[2, 2], [0]], "linked state", "copies"),
    "copies, then state": levels([[1, 3], [0]], "copies", "linked state"),
    "opt-tree over states": tree(Optimal(6), state("linked")),
}
"""Methods for decoder-only targets."""
SLOTS: dict[str, Make] = {
    "anchored": slots(previous_token_rank=3),
    "paper": slots(slots="paper"),
    "bidirectional": slots(slots="paper", prefix_attention="bidirectional"),
    "target's encoder": slots(encoder="target", previous_token_rank=3),
    "slots reviewed": levels(REVIEWED, "causal", "anchored", "copies"),
    "slots in turn": levels(IN_TURN, "causal", "target's encoder", "copies"),
    "opt-tree over slots": tree(Optimal(6), slots(previous_token_rank=3)),
    "rsd-c over slots": tree(Branching((2, 1)), slots(encoder="target")),
    "rsd-s over slots": tree(Beam(3), slots()),
}
"""Methods for encoder-decoder targets with shared embeddings."""
METHODS = CHAINS | TREES | DECODERS | SLOTS
EVERY = {"llama": [*CHAINS, *TREES, *DECODERS], "marian": [*CHAINS, *TREES, *SLOTS]}
"""The methods of each family."""
