"""Splices are made of two texts that agree where they are joined, and of nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drafttrain.data.inputs.splices import SHIFT, splice_texts

CAPTIONS = [
    "a man in a red shirt is walking",
    "two dogs in a red car are asleep",
    "the old man in a boat is fishing now",
    "somebody is walking home",
]


def parents(text: str, texts: list[str]) -> list[tuple[str, str]]:
    """Pairs of texts that `text` can have been spliced from, by the rule itself."""
    words, found = text.split(), []
    for first in map(str.split, texts):
        for second in map(str.split, texts):
            for place in range(1, len(first) - 2):
                there = place + len(second) - len(words)
                if not 1 <= there < len(second) - 2 or abs(there - place) > SHIFT:
                    continue
                agree = first[place : place + 2] == second[there : there + 2]
                if agree and first[:place] + second[there:] == words:
                    found.append((" ".join(first), " ".join(second)))
    return found


def test_all_splices_of_four_captions_by_hand():
    assert sorted(splice_texts(CAPTIONS, 100)) == [
        "a man in a boat is fishing now",
        "a man in a red car are asleep",
        "the old man in a red car are asleep",
        "the old man in a red shirt is walking",
        "two dogs in a boat is fishing now",
        "two dogs in a red shirt is walking",
    ]


@given(
    texts=st.lists(st.lists(st.sampled_from("abc"), max_size=9).map(" ".join), max_size=6),
    count=st.integers(0, 20),
    seed=st.integers(0, 3),
)
def test_every_splice_is_new_and_has_two_parents(texts, count, seed):
    made = splice_texts(texts, count, seed)
    assert len(made) <= count
    assert len(set(made)) == len(made)
    assert not set(made) & set(texts)
    assert all(parents(text, texts) for text in made)
    assert made == splice_texts(texts, count, seed)


def test_texts_without_two_words_in_common_give_none():
    assert splice_texts(["a b c d e", "f g h i j", "a", ""], 10) == []


def test_texts_are_not_joined_at_places_far_apart():
    early, late = "x1 a b x2 x3 x4 x5 x6 x7 x8", "y1 y2 y3 y4 y5 a b y6 y7"
    assert len(splice_texts([early, late], 10)) == 2  # four words apart
    assert splice_texts([early, f"y0 {late}"], 10) == []
