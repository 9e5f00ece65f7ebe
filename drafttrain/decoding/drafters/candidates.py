"""Previous-token features in decoding: the best tokens of each slot of a block are rescored once
the previous token is known."""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafttrain.decoding.sampling import at_least_float32, likeliest
from drafttrain.decoding.trees.shapes import Likeliest
from drafttrain.decoding.types import NOT_FINITE, NotFinite

CANDIDATES = 64
"""Tokens per slot that are rescored with the previous token; all others keep their scores. With 256
a tree of 16 nodes needs 2 % fewer rounds (Multi30k, 6 + 6 layers), each over 10 % longer."""


class PreviousTokenCorrection:
    """Corrects the logits of a slot once the previous token is known.

    The correction of a token's score is the inner product of its output row (`rows`) and
    SiLU(f + h), where f are the features of the previous token (`features`) and h those computed
    from the slot's hidden state (`from_hidden`). Both tables hold every token, so a pair of tokens
    is scored quickly. Shapes: from_hidden [N, D] -> [N, R]; rows [V, R], features [V or more, R].
    """

    def __init__(
        self, from_hidden: Callable[[Tensor], Tensor], rows: Tensor, features: Tensor
    ) -> None:
        self.from_hidden, self.rows, self.features = from_hidden, rows, features

    @cached_property
    def features_on_host(self) -> np.ndarray:
        return _on_host(self.features)

    def chains(self, requests: Sequence[tuple[Tensor, Tensor, int]]) -> list[Tensor]:
        """Chooses the likeliest tokens left to right, among the candidates of each slot.

        Each request holds a sequence's slot states [K, D], its logits [K, V] and the token before
        the first slot. Returns [K] tokens for each, without waiting for the device.
        """
        states, logits, last = zip(*requests, strict=True)
        padded = [
            pad_sequence(list(part), batch_first=True) if len(part) > 1 else part[0][None]
            for part in (states, logits)
        ]
        chains = Candidates(*padded, self).likeliest_chains(last)
        return [chain[: len(rows)] for chain, rows in zip(chains, logits, strict=True)]

    def after(self, states: Tensor, logits: Tensor, previous: Tensor) -> Tensor:
        """Returns the logits of slots given their previous tokens.

        Shapes: [N, D], [N, V], [N] -> [N, V].
        """
        candidates = Candidates(states[:, None], logits[:, None], self)
        scores = candidates.after(0, previous[:, None])[:, 0]
        return logits.scatter(-1, candidates.tokens[:, 0], scores.to(logits.dtype))


class Candidates:
    """The best tokens of each slot, and their scores once the previous token is known.

    Shapes: states [B, K, D], logits [B, K, V].
    """

    def __init__(self, states: Tensor, logits: Tensor, correction: PreviousTokenCorrection) -> None:
        shape = logits.shape[:-1]
        scores, tokens = likeliest(logits.flatten(0, 1), CANDIDATES)
        self.tokens, self.scores = tokens.unflatten(0, shape), scores.unflatten(0, shape)
        """[B, K, C] each, best first."""
        self._correction = correction
        self._from_hidden = correction.from_hidden(states)
        self._directions = F.embedding(self.tokens, correction.rows)

    def after(self, slot: int, previous: Tensor) -> Tensor:
        """Returns the scores of a slot's candidates after N tokens of the previous slot.

        Shapes: [B, N] -> [B, N, C].
        """
        scores = self.scores[:, slot, None].expand(-1, previous.shape[1], -1)
        features = F.embedding(previous, self._correction.features)
        gate = F.silu(self._from_hidden[:, slot, None] + features).to(scores.dtype)
        directions = self._directions[:, slot].to(scores.dtype)  # float32, in half precision too
        return torch.baddbmm(scores, gate, directions.mT)

    def likeliest_chains(self, last: Sequence[int]) -> Tensor:
        """Chooses the likeliest token of each slot given the one chosen for the previous slot.

        `last`: the token before the first slot. Does not wait for the device; on a device,
        `NOT_FINITE` marks slots with NaN or infinite scores, on the CPU they raise NotFinite.
        Shapes: [B] -> [B, K].
        """
        finite = self.scores[..., 0].isfinite()
        if finite.device.type == "cpu" and not finite.all():
            raise NotFinite.of_drafter()
        directions, features = self._directions, self._correction.features
        known = directions.dtype == features.dtype in (torch.float32, torch.float64)
        if len(last) == 1 and features.device.type == "cpu" and known:
            return torch.tensor([self._likeliest_chain(last[0])])
        previous, drafted = torch.tensor(last, device=self.tokens.device)[:, None], []
        for slot in range(self.tokens.shape[1]):
            best = self.after(slot, previous)[:, 0].argmax(-1, keepdim=True)
            previous = self.tokens[:, slot].gather(1, best)
            drafted.append(previous)
        return torch.cat(drafted, dim=1).where(finite, NOT_FINITE)

    def _likeliest_chain(self, previous: int) -> list[int]:
        """`likeliest_chains` for one sequence in NumPy: call overhead dominates such small
        products, and NumPy's is a quarter of torch's."""
        tokens, scores = self.tokens[0].numpy(), self.scores[0].numpy()
        directions, from_hidden = self._directions[0].numpy(), self._from_hidden[0].numpy()
        features, drafted = self._correction.features.numpy(), []
        for slot in range(len(tokens)):
            gate = _silu(from_hidden[slot] + features[previous])
            best = int((scores[slot] + directions[slot] @ gate).argmax())
            previous = int(tokens[slot, best])
            drafted.append(previous)
        return drafted


class LikelyTokens:
    """The likeliest tokens of each slot of a block without the previous token, and their
    log-probabilities once that is known, which trees are built from.

    With previous-token features there are at least CANDIDATES; all other tokens keep their scores.
    Everything is copied to the host before the first level, and NumPy computes, in half of torch's
    time for products of this size. Shapes: states [K, D], logits [K, V].
    """

    def __init__(
        self,
        states: Tensor,
        logits: Tensor,
        top_tokens: Likeliest,
        correction: PreviousTokenCorrection | None,
    ) -> None:
        count, temperature = top_tokens
        if correction is not None:
            count = max(count, CANDIDATES)
        exact = at_least_float32(logits) / temperature
        scores, tokens = likeliest(exact, count)
        self.tokens, self._scores = tokens.cpu().numpy(), scores.cpu().numpy()
        """[K, C] each."""
        total = exact.logsumexp(-1, keepdim=True).cpu().numpy()
        with np.errstate(divide="ignore", invalid="ignore"):  # no others, scores with NaN
            mass = np.exp(self._scores - total).sum(-1, keepdims=True)
            self._others = np.log1p(-np.minimum(mass, 1.0)) + total
        """[K, 1] log-sum-exp of the scores of all other tokens of a slot."""
        self._correction = correction
        if correction is not None:
            self._from_hidden = _on_host(correction.from_hidden(states))
            self._directions = _on_host(F.embedding(tokens, correction.rows)) / temperature

    def after(self, slot: int, previous: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns a slot's tokens and their log-probabilities after N tokens of the previous slot,
        or after the last committed token. Shapes: [N] -> [N, C] each."""
        scores = np.broadcast_to(self._scores[slot], (len(previous), self._scores.shape[1]))
        if self._correction is not None:
            gate = _silu(self._from_hidden[slot] + self._correction.features_on_host[previous])
            scores = scores + gate @ self._directions[slot].T
        top = scores.max(-1, keepdims=True)
        with np.errstate(invalid="ignore"):  # scores that are not finite, which trees refuse
            total = np.log(np.exp(scores - top).sum(-1, keepdims=True)) + top
            log_probs = scores - np.logaddexp(total, self._others[slot])
        return np.broadcast_to(self.tokens[slot], scores.shape), log_probs


def _on_host(values: Tensor) -> np.ndarray:
    """Copies values to the host, as float32 at least: NumPy has no bfloat16."""
    return at_least_float32(values).cpu().numpy()


def _silu(x: np.ndarray) -> np.ndarray:
    return x * (0.5 * np.tanh(0.5 * x) + 0.5)  # tanh cannot overflow
