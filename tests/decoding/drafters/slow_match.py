"""The longest repeated suffix, found the slow way."""

from __future__ import annotations


def slow_match(sequence: list[int]) -> tuple[int, int]:
    """The longest suffix that ends earlier too; the leftmost such end."""
    for length in range(len(sequence) - 1, 0, -1):
        suffix = sequence[-length:]
        for end in range(length - 1, len(sequence) - 1):
            if sequence[end - length + 1 : end + 1] == suffix:
                return length, end
    return 0, -1
