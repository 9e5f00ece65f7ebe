"""The states of draft tokens that acceptance heads read: their kinds and sizes.

`token`: the drafter's last hidden state at the draft token's own position (SpecDec++, Section 3.2).
It is known only after the token has been an input, so drafting stops one forward pass late.
`drawn`: what is known when the token is drawn: the hidden state that predicted it, and statistics
of the predicted distribution. It costs no extra forward pass, and contains the probability of the
draft token, which the acceptance probability min(1, target / draft) depends on.

Block drafters have neither: a block is one call, so a draft that ends earlier saves no call.
"""

import math

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from drafttrain.config.base import ConfigError
from drafttrain.config.kinds import KINDS, StateKind, in_words, kind_of

ROW_FEATURES = 6
"""Number of features that `drawn_states` appends to a hidden state."""
MIN_LOG_PROB = -1e6
"""Lower bound of log-probabilities; its probability is 0 in any data type."""


def drawn_states(hidden: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
    """Computes the `drawn` states of tokens, each drawn from its own row of logits.

    Appends to the hidden state of each row, before temperature: the log-probabilities of the token
    and of the two most likely tokens, the entropy (nats), and the probabilities of the token and of
    the most likely token. Shapes: hidden [N, D], logits [N, V], tokens [N]
    -> [N, D + ROW_FEATURES], float32 at least.
    """
    log_probs = logits.log_softmax(dim=-1).clamp_min(MIN_LOG_PROB)  # no 0 * -inf in the entropy
    of_token = log_probs.gather(-1, tokens.to(logits.device)[:, None])
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1, keepdim=True)
    likely = torch.cat([of_token, log_probs.topk(2, dim=-1).values], dim=-1)
    return torch.cat([hidden.to(logits), likely, entropy, likely[:, :2].exp()], dim=-1)


def drawn_state(hidden: Tensor, logits: Tensor, token: int) -> Tensor:
    """Computes the `drawn` state of one token; on the CPU by NumPy, which has less call overhead.
    Shapes: hidden [D], logits [V] -> [D + ROW_FEATURES]."""
    if logits.device.type != "cpu" or logits.dtype not in (torch.float32, torch.float64):
        return drawn_states(hidden[None], logits[None], torch.tensor([token]))[0]
    row, width = logits.numpy(), len(hidden)
    state = np.empty(width + ROW_FEATURES, row.dtype)
    state[:width] = hidden.numpy() if hidden.dtype == logits.dtype else hidden.to(logits.dtype)
    best = row.argmax()
    below = row - row[best]
    if below[below.argmin()] < MIN_LOG_PROB:
        np.maximum(below, MIN_LOG_PROB, out=below)  # no 0 * -inf in the entropy
    weights = np.exp(below)
    total, weighted = float(weights.sum()), float(weights.dot(below))
    norm = math.log(total)
    of_token = max(float(below[token]) - norm, MIN_LOG_PROB)
    below[best] = -math.inf
    second = max(float(below[below.argmax()]) - norm, MIN_LOG_PROB)
    entropy = norm - weighted / total  # log Z - E[x], x = logits minus their maximum
    state[width:] = of_token, -norm, second, entropy, math.exp(of_token), 1.0 / total
    return torch.from_numpy(state)


def check_has_states(drafter: PretrainedConfig) -> None:
    """Raises ConfigError for a drafter without states of draft tokens."""
    kind = kind_of(drafter)
    if "hidden" not in kind.provides:
        able = in_words([one for one in KINDS.values() if "hidden" in one.provides])
        raise ConfigError(
            f"acceptance heads read the hidden states of {able}, but the drafter is {kind.words}; "
            "stop its drafts by stop.kind=cumulative or confidence instead, which need no training"
        )


def state_size(drafter: PretrainedConfig, kind: StateKind) -> int:
    """Returns the size of a state of this kind."""
    text = drafter.get_text_config(decoder=True)
    # OPT projects its hidden states to another width
    width = text.to_dict().get("word_embed_proj_dim") or text.hidden_size
    return width + ROW_FEATURES if kind == "drawn" else width
