"""The longest suffix of a growing sequence that occurred before, without reading it again.

A suffix automaton (Blumer et al. 1985): each state is a set of substrings that end at the same
places, `links` lead to the longest suffix that ends at more of them, and `ends` holds the leftmost
place. Appending takes amortised constant time, and each token can be taken back.
"""

from __future__ import annotations

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
        self._undo: list[tuple[int, int, list[tuple[int, int]], int, int]] = []
        """Of each token: states before it, the last of them, the transitions that it changed as
        (state, old target or -1), and the state whose link it changed, with the old link."""

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """One more token at the end."""
        following, links, lengths = self._next, self._links, self._lengths
        states, before = len(following), self._last
        changed: list[tuple[int, int]] = []
        relinked, old_link = -1, -1
        self._last = added = self._add(lengths[before] + 1, len(self.tokens))
        self.tokens.append(token)
        state = before
        while state >= 0 and token not in following[state]:
            following[state][token] = added
            changed.append((state, -1))
            state = links[state]
        if state < 0:
            links[added] = ROOT
        else:
            target = following[state][token]
            if lengths[target] == lengths[state] + 1:
                links[added] = target
            else:
                copy = self._add(lengths[state] + 1, self._ends[target])
                following[copy] = dict(following[target])
                links[copy] = links[target]
                while state >= 0 and following[state].get(token) == target:
                    following[state][token] = copy
                    changed.append((state, target))
                    state = links[state]
                relinked, old_link = target, links[target]
                links[target] = links[added] = copy
        self._undo.append((states, before, changed, relinked, old_link))

    def truncate(self, length: int) -> None:
        """Take back all tokens but the first ones."""
        while len(self.tokens) > length:
            token = self.tokens.pop()
            states, self._last, changed, relinked, old_link = self._undo.pop()
            for state, target in reversed(changed):
                if target < 0:
                    del self._next[state][token]
                else:
                    self._next[state][token] = target
            if relinked >= 0:
                self._links[relinked] = old_link
            for part in (self._next, self._links, self._lengths, self._ends):
                del part[states:]

    def longest_match(self) -> tuple[int, int]:
        """Length of the longest suffix that occurs earlier too, and where that leftmost ends.

        The two may overlap, as in periodic text. (0, -1) where no token of the end came before.
        """
        state = self._links[self._last]
        if state <= ROOT:
            return 0, -1
        return self._lengths[state], self._ends[state]

    def _add(self, length: int, end: int) -> int:
        self._next.append({})
        self._links.append(ROOT)
        self._lengths.append(length)
        self._ends.append(end)
        return len(self._next) - 1
