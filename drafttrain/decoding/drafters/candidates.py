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
from drafttrain.decoding.shared import joined
from drafttrain.decoding.trees.shapes import of_level

CANDIDATES = 64
"""Tokens a slot that are scored again with the token before them; all others keep their scores."""
CANDIDATES_OF_TREES = 256
"""The same below the nodes of a tree, which may come after tokens that are not a slot's first
choice, and whose level is scored at once: a tree of 30 nodes has 4 % more of its tokens accepted
than with 64, a chain 2 %, and takes more time to choose than that saves."""


def best_alone(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The candidates of slots: scores and tokens, best first. Shapes: [N, V] -> [N, C], [N, C]."""
    return likeliest(logits, CANDIDATES)


class Link:
    """What a slot's row becomes once the token before it is known.

    Of each token it has what its scores (rows), and what those after it (features), are made of, so
    that a pair of tokens is quickly scored. from_hidden: what a slot's state adds to the features.
    Shapes: from_hidden [N, D] -> [N, R]; rows [V, R], features [V or more, R].
    """

    def __init__(
        self, from_hidden: Callable[[Tensor], Tensor], rows: Tensor, features: Tensor
    ) -> None:
        self.from_hidden, self.rows, self.features = from_hidden, rows, features

    def candidates(self, states: Sequence[Tensor], logits: Sequence[Tensor]) -> Candidates:
        """The best tokens of slots, to be scored after the token before, of several sequences.
        Shapes: [K, D], [K, V] each."""
        return Candidates(
            joined(logits),
            self.from_hidden(joined(states)),
            [len(own) for own in states],
            self.rows,
            self.features,
        )

    def chains(self, asked: Sequence[tuple[Tensor, Tensor, int]]) -> list[Tensor]:
        """Likeliest tokens left to right, among the best candidates of each slot alone.

        Of each sequence its slots' states [K, D] and rows [K, V], and the token before the first;
        [K] each, not waited for.
        """
        states, logits, last = zip(*asked, strict=True)
        if not any(len(own) for own in states):
            return [torch.empty(0, dtype=torch.long) for _ in asked]
        found = self.candidates(states, logits).likeliest_chains(last)
        return [own[: len(rows)] for own, rows in zip(found, logits, strict=True)]

    def after(self, states: Tensor, logits: Tensor, previous: Tensor) -> Tensor:
        """Rows of slots after these tokens. Shapes: [N, D], [N, V], [N] -> [N, V]."""
        scores, tokens = best_alone(logits)
        gate = F.silu(self.from_hidden(states) + F.embedding(previous, self.features))
        directions = F.embedding(tokens, self.rows).to(scores.dtype)
        scores = torch.baddbmm(scores[..., None], directions, gate.to(scores.dtype)[..., None])
        return logits.scatter(-1, tokens, scores[..., 0].to(logits.dtype))


class LikelyTokens:
    """The likeliest tokens of every slot of a block, and what a tree is chosen by: their
    log-probabilities once the token before them is known.

    They are the likeliest without the token before, and that token moves probability among them
    only: all others keep their scores. On a CPU only what stands below the nodes of a tree is
    looked up; from another device all is fetched at once. temperatures: by slot (`of_level`).
    Shapes: states [K, D], logits [K, V].
    """

    def __init__(
        self,
        states: Tensor,
        logits: Tensor,
        count: int,
        temperatures: Sequence[float],
        link: Link | None,
        last: int,
    ) -> None:
        self._temperatures = [of_level(temperatures, slot) for slot in range(len(logits))]
        exact = exact_enough(logits)
        scale = torch.tensor(self._temperatures, dtype=exact.dtype, device=exact.device)
        log_probs = (exact / scale[:, None]).log_softmax(-1)
        scores, tokens = likeliest(log_probs, count)
        self.tokens, self._scores = tokens.cpu().numpy(), scores.cpu().numpy()  # [K, C] each
        self._linked = link is not None
        if link is None:
            return
        others = torch.log1p(-scores.exp().sum(-1).clamp(max=1.0))
        self._others, self._from_hidden = (
            part.to(scores).cpu().numpy() for part in (others, link.from_hidden(states))
        )
        self._rows = _lines(link.rows, tokens)
        before = torch.cat((tokens[:-1].flatten(), torch.tensor([last], device=tokens.device)))
        self._features = _lines(link.features, before)

    def after(self, slot: int, previous: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """A slot's tokens below nodes of the slot before, whose tokens these are, or below the last
        committed token, and their log-probabilities. Shapes: [N] -> [N, C] each."""
        shape = len(previous), self.tokens.shape[1]
        tokens, scores = (np.broadcast_to(own[slot], shape) for own in (self.tokens, self._scores))
        if not self._linked:
            return tokens, scores
        gate = _silu(self._from_hidden[slot] + self._features(np.array(previous)))
        rows = torch.from_numpy(self._rows(self.tokens[slot]))
        moved = torch.from_numpy(gate) @ rows.T  # threads of NumPy's own would get in PyTorch's way
        after = scores + moved.numpy() / self._temperatures[slot]
        best = after.max(-1, keepdims=True)
        total = np.log(np.exp(after - best).sum(-1, keepdims=True)) + best
        return tokens, after - np.logaddexp(total, self._others[slot])


def _lines(table: Tensor, tokens: Tensor) -> Callable[[np.ndarray], np.ndarray]:
    """Looks up lines of a table, for NumPy: the table's own on a CPU, else those of these tokens,
    which are fetched now. Shapes: table [V, R] -> of tokens [N] their lines [N, R]."""
    if table.device.type == "cpu" and table.dtype in (torch.float32, torch.float64):
        return table.numpy().__getitem__
    places = np.unique(tokens.cpu().numpy())
    known = torch.from_numpy(places).to(table.device)
    fetched = exact_enough(F.embedding(known, table)).cpu().numpy()
    return lambda tokens: fetched[np.searchsorted(places, tokens)]


def _silu(x: np.ndarray) -> np.ndarray:
    return x * (0.5 * np.tanh(0.5 * x) + 0.5)  # tanh cannot overflow


class Candidates:
    """The best tokens of each slot alone; their scores, once the token before is known.

    Scoring them takes a small part of a projection's time. rows, features: as of `Link`. Shapes:
    logits [N, V] and from_hidden [N, R] of the slots of all sequences, which have these lengths;
    those of fewer slots are filled up.
    """

    def __init__(
        self,
        logits: Tensor,
        from_hidden: Tensor,
        lengths: Sequence[int],
        rows: Tensor,
        features: Tensor,
    ) -> None:
        scores, tokens = best_alone(logits)
        self.tokens, self._scores, self._from_hidden = (
            _in_lines(own, lengths) for own in (tokens, scores, from_hidden)
        )
        self._directions = F.embedding(self.tokens, rows)  # tokens [B, K, C]
        self._features = features

    def after(self, slot: int, previous: Tensor) -> Tensor:
        """Scores of a slot's candidates after these tokens. Shapes: [B] -> [B, C]."""
        gate = F.silu(self._from_hidden[:, slot] + F.embedding(previous, self._features))
        scores = self._scores[:, slot]  # float32, in half precision too
        directions, gate = self._directions[:, slot].to(scores.dtype), gate.to(scores.dtype)
        return torch.baddbmm(scores[..., None], directions, gate[..., None])[..., 0]

    def likeliest_chains(self, last: Sequence[int]) -> Tensor:
        """The likeliest token of each slot after that of the slot before, of the first one after
        the last committed token; not waited for. Shapes: [B] -> [B, K]."""
        if len(last) == 1 and self._features.device.type == "cpu" and self._is_whole():
            return torch.tensor([self._likeliest_chain(last[0])])
        previous, drafted = torch.tensor(last, device=self.tokens.device), []
        for slot in range(self.tokens.shape[1]):
            best = self.after(slot, previous).argmax(-1, keepdim=True)
            previous = self.tokens[:, slot].gather(1, best)[:, 0]
            drafted.append(previous)
        return torch.stack(drafted, dim=1)

    def _is_whole(self) -> bool:
        """Whether NumPy knows all that is multiplied."""
        return self._directions.dtype == self._features.dtype in (torch.float32, torch.float64)

    def _likeliest_chain(self, previous: int) -> list[int]:
        """`likeliest_chains` of one sequence, by NumPy: of products so small calls are most of the
        time, and there they cost a quarter."""
        tokens, scores = self.tokens[0].numpy(), self._scores[0].numpy()
        directions, from_hidden = self._directions[0].numpy(), self._from_hidden[0].numpy()
        features, drafted = self._features.numpy(), []
        for slot in range(len(tokens)):
            gate = _silu(from_hidden[slot] + features[previous])
            best = int((scores[slot] + directions[slot] @ gate).argmax())
            previous = int(tokens[slot, best])
            drafted.append(previous)
        return drafted


def _in_lines(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Shapes: [N, ...] -> [B, K, ...]."""
    if len(lengths) == 1:
        return rows[None]
    return pad_sequence(rows.split(list(lengths)), batch_first=True)
