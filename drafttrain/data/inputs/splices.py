"""More inputs from those there are: the start of one and the end of another, where they agree.

A target answers any input, so a drafter can learn from inputs that nobody wrote; and on inputs that
the target was not trained on, it answers as it will when it is served.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from random import Random

SHIFT = 4
"""Most words by which the two places of a splice may be apart."""
TRIES = 30
"""Draws for each splice that is wanted, before giving up: most fail, as no other text agrees."""


def splice_texts(texts: Sequence[str], count: int, seed: int = 0) -> list[str]:
    """At most `count` new texts, none twice: of two that share two words at about the same place,
    the first up to there and the second from there on.

    Words are what white space separates. The first and the last word of a text are no place to
    join at. Few or very different texts give fewer splices than asked for.
    """
    random = Random(seed)
    words = [text.split() for text in texts]
    places: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for number, line in enumerate(words):
        for place in range(1, len(line) - 2):
            places[line[place], line[place + 1]].append((number, place))
    long_enough = [number for number, line in enumerate(words) if len(line) > 3]
    known, made = {" ".join(line) for line in words}, []
    for _ in range(count * TRIES if long_enough else 0):
        if len(made) == count:
            break
        number = random.choice(long_enough)
        line = words[number]
        place = random.randrange(1, len(line) - 2)
        other, there = random.choice(places[line[place], line[place + 1]])
        text = " ".join(line[:place] + words[other][there:])
        if abs(there - place) <= SHIFT and text not in known:
            known.add(text)
            made.append(text)
    return made
