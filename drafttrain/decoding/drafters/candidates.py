"""Previous-token features in decoding: the best tokens of each slot of a block, scored again once
the token before them is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafttrain.decoding.sampling import exact_enough, likeliest
from drafttrain.decoding.trees.shapes import Likeliest, temperature_at
from drafttrain.decoding.types import NOT_FINITE, NotFinite

CANDIDATES = 64
"""Tokens a slot that are scored again with the token before them; all others keep their scores."""
TREE_CANDIDATES = 256
"""The same below the nodes of a tree, which may come after tokens that are not a slot's first
choice: a tree of 30 nodes has 4 % more of its tokens accepted than with 64, a chain 2 %, and takes
more time to choose than that saves."""


class PreviousTokenCorrection:
    """What a slot's row becomes once the token before it is known.

    Of each token it has what its scores (rows), and what those after it (features), are made of, so
    that a pair of tokens is quickly scored. from_hidden: what a slot's state adds to the features.
    Shapes: from_hidden [N, D] -> [N, R]; rows [V, R], features [V or more, R].
    """

    def __init__(
        self, from_hidden: Callable[[Tensor], Tensor], rows: Tensor, features: Tensor
    ) -> None:
        self.from_hidden, self.rows, self.features = from_hidden, rows, features

    def chains(self, requests: Sequence[tuple[Tensor, Tensor, int]]) -> list[Tensor]:
        """Likeliest tokens left to right, among the best candidates of each slot alone.

        Of each sequence its slots' states [K, D] and rows [K, V], and the token before the first;
        [K] each, not waited for.
        """
        states, logits, last = zip(*requests, strict=True)
        lengths = [len(own) for own in logits]
        if not any(lengths):
            return [torch.empty(0, dtype=torch.long) for _ in requests]
        if len(requests) > 1:
            states, logits = (
                pad_sequence(list(part), batch_first=True) for part in (states, logits)
            )
        else:
            states, logits = states[0][None], logits[0][None]
        found = Candidates(states, logits, self).likeliest_chains(last)
        return [own[:length] for own, length in zip(found, lengths, strict=True)]

    def after(self, states: Tensor, logits: Tensor, previous: Tensor) -> Tensor:
        """Rows of slots after these tokens. Shapes: [N, D], [N, V], [N] -> [N, V]."""
        found = Candidates(states[:, None], logits[:, None], self)
        scores = found.after(0, previous[:, None])[:, 0]
        return logits.scatter(-1, found.tokens[:, 0], scores.to(logits.dtype))


class Candidates:
    """The best tokens of each slot alone; their scores, once the token before is known.

    Scoring them takes a small part of a projection's time. link: None where no row depends on the
    token before it. Shapes: states [B, K, D], logits [B, K, V].
    """

    def __init__(
        self,
        states: Tensor,
        logits: Tensor,
        correction: PreviousTokenCorrection | None,
        count: int | None = None,
    ) -> None:
        shape = logits.shape[:-1]
        scores, tokens = likeliest(logits.flatten(0, 1), count or CANDIDATES)
        self.tokens, self.scores = tokens.unflatten(0, shape), scores.unflatten(0, shape)
        """[B, K, C] each, best first."""
        self._correction = correction
        if correction is not None:
            self._from_hidden = correction.from_hidden(states)
            self._directions = F.embedding(self.tokens, correction.rows)

    def after(self, slot: int, previous: Tensor) -> Tensor:
        """Scores of a slot's candidates after some tokens of the slot before. Shapes: [B, N] ->
        [B, N, C]."""
        scores = self.scores[:, slot, None].expand(-1, previous.shape[1], -1)
        if self._correction is None:
            return scores
        features = F.embedding(previous, self._correction.features)
        gate = F.silu(self._from_hidden[:, slot, None] + features).to(scores.dtype)
        directions = self._directions[:, slot].to(scores.dtype)  # float32, in half precision too
        return torch.baddbmm(scores, gate, directions.mT)

    def likeliest_chains(self, last: Sequence[int]) -> Tensor:
        """The likeliest token of each slot after that of the slot before, of the first one after
        the last committed token; not waited for. Shapes: [B] -> [B, K]."""
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
        """`likeliest_chains` of one sequence, by NumPy: of products so small calls are most of the
        time, and there they cost a quarter."""
        tokens, scores = self.tokens[0].numpy(), self.scores[0].numpy()
        directions, from_hidden = self._directions[0].numpy(), self._from_hidden[0].numpy()
        features, drafted = self._correction.features.numpy(), []
        for slot in range(len(tokens)):
            x = from_hidden[slot] + features[previous]
            gate = x * (0.5 * np.tanh(0.5 * x) + 0.5)  # SiLU; tanh cannot overflow
            best = int((scores[slot] + directions[slot] @ gate).argmax())
            previous = int(tokens[slot, best])
            drafted.append(previous)
        return drafted


class LikelyTokens:
    """The likeliest tokens of every slot of a block, and what a tree is chosen by: their
    log-probabilities once the token before them is known.

    They are the likeliest without the token before, and that token moves probability among them
    only: all others keep their scores. Shapes: states [K, D], logits [K, V].
    """

    def __init__(
        self,
        states: Tensor,
        logits: Tensor,
        wanted: Likeliest,
        correction: PreviousTokenCorrection | None,
    ) -> None:
        count, temperatures = wanted
        self._temperatures = [temperature_at(temperatures, slot) for slot in range(len(logits))]
        exact = exact_enough(logits)
        self._found = Candidates(states[None], exact[None], correction, count)
        self.tokens = self._found.tokens[0]
        scale = torch.tensor(self._temperatures, dtype=exact.dtype, device=exact.device)[:, None]
        total = (exact / scale).logsumexp(-1, keepdim=True)
        known = (self._found.scores[0] / scale - total).exp().sum(-1, keepdim=True)
        self._others = torch.log1p(-known.clamp(max=1.0)) + total
        """[K, 1] logarithm of what all other tokens of a slot add to its softmax."""

    def after(self, slot: int, previous: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """A slot's tokens below nodes of the slot before, whose tokens these are, or below the last
        committed token, and their log-probabilities. Shapes: [N] -> [N, C] each."""
        before = torch.tensor([previous], device=self.tokens.device)
        scores = self._found.after(slot, before)[0] / self._temperatures[slot]
        total = torch.logaddexp(scores.logsumexp(-1, keepdim=True), self._others[slot])
        log_probs = scores - total
        tokens = self.tokens[slot].expand(len(previous), -1)
        return tokens.cpu().numpy(), log_probs.cpu().numpy()
