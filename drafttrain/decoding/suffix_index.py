"""The longest suffix of a growing sequence that occurred before, without reading it again.

A suffix automaton (Blumer et al. 1985): each state is a set of substrings that end at the same
places, `links` lead to the longest suffix that ends at more of them, and `ends` holds the leftmost
place. Appending takes amortised constant time. What was appended since a mark can be taken back.
"""

from __future__ import annotations

from collections.abc import Callable

ROOT = 0


class SuffixIndex:
    """All substrings of a sequence of tokens, by state."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._links: list[int] = [-1]
        self._lengths: list[int] = [0]
        self._ends: list[int] = [-1]
        """Of each state: the index of the last token of its leftmost occurrence."""
        self._last = ROOT
        self._undo: list[Callable[[], None]] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """One more token at the end."""
        before, self._last = self._last, self._add(self._lengths[self._last] + 1, len(self.tokens))
        self.tokens.append(token)
        state, added = before, self._last
        while state >= 0 and token not in self._next[state]:
            self._set_next(state, token, added)
            state = self._links[state]
        if state < 0:
            self._links[added] = ROOT
            return
        target = self._next[state][token]
        if self._lengths[target] == self._lengths[state] + 1:
            self._links[added] = target
            return
        copy = self._add(self._lengths[state] + 1, self._ends[target])
        self._next[copy] = dict(self._next[target])
        self._links[copy] = self._links[target]
        while state >= 0 and self._next[state].get(token) == target:
            self._set_next(state, token, copy)
            state = self._links[state]
        self._set_link(target, copy)
        self._links[added] = copy

    def longest_match(self) -> tuple[int, int]:
        """Length of the longest suffix that occurs earlier too, and where that leftmost ends.

        The two may overlap, as in periodic text. (0, -1) where no token of the end came before.
        """
        state = self._links[self._last]
        if state <= ROOT:
            return 0, -1
        return self._lengths[state], self._ends[state]

    def mark(self) -> None:
        """Remember this state of the sequence, to come back to. Marks do not nest."""
        self._undo = []
        self._marked = (len(self.tokens), len(self._next), self._last)

    def rollback(self) -> None:
        """Take back all that was appended since the mark."""
        assert self._undo is not None, "nothing was marked"
        for undo in reversed(self._undo):
            undo()
        tokens, states, self._last = self._marked
        del self.tokens[tokens:]
        for part in (self._next, self._links, self._lengths, self._ends):
            del part[states:]
        self._undo = None

    def _add(self, length: int, end: int) -> int:
        self._next.append({})
        self._links.append(ROOT)
        self._lengths.append(length)
        self._ends.append(end)
        return len(self._next) - 1

    def _set_next(self, state: int, token: int, target: int) -> None:
        if self._undo is not None:
            transitions, old = self._next[state], self._next[state].get(token)
            if old is None:
                self._undo.append(lambda: transitions.pop(token))
            else:
                self._undo.append(lambda: transitions.__setitem__(token, old))
        self._next[state][token] = target

    def _set_link(self, state: int, link: int) -> None:
        if self._undo is not None:
            old = self._links[state]
            self._undo.append(lambda: self._links.__setitem__(state, old))
        self._links[state] = link
