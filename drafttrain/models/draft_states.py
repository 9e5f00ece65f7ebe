"""What acceptance heads read of a drafted token: the kinds of states, and their sizes.

`token`: the drafter's last hidden state at the drafted token's own position (SpecDec++, Section
3.2). It is there only once the token has been fed back, so a stop comes a drafter pass late.
`drawn`: what is known the moment the token is drawn: the hidden state that its row came from, and
how likely that row made it. No pass is lost, and the probability of the drafted token, which
acceptance min(1, target / draft) depends on, need not be guessed from a hidden state.
`slot`: the hidden state of a block drafter's slot, whose token is not drawn yet.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from drafttrain.config.base import ConfigError
from drafttrain.config.kinds import KINDS, StateKind, in_words, kind_of

ROW_FEATURES = 6
"""Numbers that `drawn_states` puts behind a hidden state."""
LEAST = -1e6
"""A log-probability whose probability is zero in any number type."""


def drawn_states(hidden: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
    """The `drawn` states of tokens, each drawn from a row of its own.

    Behind the hidden state come, of the row before temperature: log-probabilities of the token and
    of the two most likely ones, entropy (nats), and probabilities of the token and of the most
    likely one. Few operations: drafting does this for every token.
    Shapes: hidden [N, D] (each row was computed from), logits [N, V], tokens [N]
    -> [N, D + ROW_FEATURES], float32 at least.
    """
    log_probs = logits.log_softmax(dim=-1).clamp_min(LEAST)  # excluded tokens count nothing
    of_token = log_probs.gather(-1, tokens.to(logits.device)[:, None])
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1, keepdim=True)
    likely = torch.cat([of_token, log_probs.topk(2, dim=-1).values], dim=-1)
    return torch.cat([hidden.to(logits), likely, entropy, likely[:, :2].exp()], dim=-1)


def drawn_state(hidden: Tensor, logits: Tensor, token: int) -> Tensor:
    """The `drawn` state of one token: drafting works it out before each next one.

    On the CPU by NumPy on the tensors' own memory, since at this size calls are all that counts,
    and there they cost less. Shapes: hidden [D], logits [V] -> [D + ROW_FEATURES].
    """
    if logits.device.type != "cpu" or logits.dtype not in (torch.float32, torch.float64):
        return drawn_states(hidden[None], logits[None], torch.tensor([token]))[0]
    row, width = logits.numpy(), len(hidden)
    state = np.empty(width + ROW_FEATURES, row.dtype)
    state[:width] = hidden.numpy() if hidden.dtype == logits.dtype else hidden.to(logits.dtype)
    best = row.argmax()
    below = row - row[best]
    if below[below.argmin()] < LEAST:
        np.maximum(below, LEAST, out=below)  # excluded tokens count nothing
    shares = np.exp(below)
    total, weighted = float(shares.dot(_ones(len(row), row.dtype))), float(shares.dot(below))
    norm = math.log(total)
    of_token = max(float(below[token]) - norm, LEAST)
    below[best] = -math.inf
    second = max(float(below[below.argmax()]) - norm, LEAST)
    entropy = norm - weighted / total
    state[width:] = of_token, -norm, second, entropy, math.exp(of_token), 1.0 / total
    return torch.from_numpy(state)


@lru_cache(maxsize=4)
def _ones(size: int, dtype: np.dtype) -> np.ndarray:
    """A dot product with these sums sooner than `sum` does, at this size."""
    return np.ones(size, dtype)


def states_of(drafter: PretrainedConfig) -> tuple[StateKind, ...]:
    """The kinds of states that a drafter has, the usual one first.

    Raises ConfigError where it has none: rows may be there, but no state that stands for a token.
    """
    kind = kind_of(drafter)
    if not kind.states:
        able = in_words([one for one in KINDS.values() if one.states])
        raise ConfigError(
            f"a drafter of kind {kind.name} shows no states that an acceptance head could read; "
            f"give {able} as drafter, or stop by --stop fixed, entropy or confidence"
        )
    return kind.states


def state_size(drafter: PretrainedConfig, kind: StateKind) -> int:
    """Numbers in a state of this kind."""
    text = drafter.get_text_config(decoder=True)
    # OPT projects its states
    width = text.to_dict().get("word_embed_proj_dim") or text.hidden_size
    return width + ROW_FEATURES if kind == "drawn" else width
