"""A donor's rows for another vocabulary: by the same text, else by the pieces that make it up.

Tokenizers spell tokens in their own way: byte-level BPE writes each byte as a letter (a space is
U+0120), sentencepiece writes a space as U+2581 and single bytes as <0x41>, others write plain text.
Tokens are compared as the bytes that they stand for, so that all of them can be matched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""What byte-level BPE writes for each byte."""
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What sentencepiece writes for a space."""
SINGLE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
ROLES = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
"""Special tokens that stand for the same thing, however they are written."""


@dataclass(frozen=True)
class Matches:
    """Which rows of a donor each token of the target's gets the mean of."""

    rows: tuple[tuple[int, ...], ...]
    """Of every row of the target's embedding: one of the donor's, those of its pieces, or none,
    which is the mean of all that have a token."""
    known: tuple[int, ...]
    """The donor's rows that have a token, in rising order."""
    exact: int
    """Tokens that the donor has too, the others being made of pieces, or of nothing."""

    @property
    def summary(self) -> str:
        """How many tokens were matched, and how."""
        some = sum(map(bool, self.rows))
        return (
            f"{len(self.rows):,} tokens: {self.exact:,} have the donor's own rows, "
            f"{some - self.exact:,} the mean of their pieces', {len(self.rows) - some:,} the mean "
            "of all"
        )


def match_tokens(
    tokenizer: PreTrainedTokenizerBase, donor: PreTrainedTokenizerBase, size: int, donor_size: int
) -> Matches:
    """The donor's rows for each of `size` rows of the target's embedding; the donor's has
    `donor_size`.

    A token has the row of the donor's token with the same bytes; else those of its pieces: the
    longest token of the donor's that the rest of it begins with, again and again. Special tokens
    are matched by their name, else by what they stand for (`ROLES`), never by pieces. Rows without
    a token, and tokens that no pieces make up, are not matched.
    """
    ours, theirs = texts_of(tokenizer), texts_of(donor)
    by_text = _by_text({token: text for token, text in theirs.items() if token < donor_size})
    special = special_rows(tokenizer, donor, donor_size)
    rows, exact = [], 0
    for token in range(size):
        own = special[token] if token in special else pieces_of(ours.get(token, b""), by_text)
        rows.append(own)
        exact += len(own) == 1
    known = (token for token in donor.get_vocab().values() if token < donor_size)
    return Matches(tuple(rows), tuple(sorted(known)), exact)


def texts_of(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """The bytes that each token stands for, but for special tokens."""
    added, special = tokenizer.added_tokens_decoder, {*tokenizer.all_special_ids}
    special |= {token for token, entry in added.items() if entry.special}
    byte_level = _is_byte_level(tokenizer)
    return {
        token: spelled.encode() if token in added else _bytes_of(spelled, byte_level)
        for spelled, token in tokenizer.get_vocab().items()
        if token not in special
    }


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether each letter of a token is a byte, as its decoder says."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]
    return '"ByteLevel"' in json.dumps(decoder)


def _bytes_of(spelled: str, byte_level: bool) -> bytes:
    if byte_level and all(letter in BYTES for letter in spelled):
        return bytes(BYTES[letter] for letter in spelled)
    single = SINGLE_BYTE.fullmatch(spelled)
    return bytes([int(single[1], 16)]) if single else spelled.replace(SPACE, " ").encode()


def _by_text(texts: Mapping[int, bytes]) -> dict[bytes, int]:
    """The token of each text; of several that are the same, the last: single bytes, which stand in
    for what has no token, come first."""
    return {text: token for token, text in sorted(texts.items()) if text}


def pieces_of(text: bytes, by_text: Mapping[bytes, int]) -> tuple[int, ...]:
    """Tokens that make up a text, the longest first everywhere; none where they do not."""
    found: list[int] = []
    while text:
        fits = (end for end in range(len(text), 0, -1) if text[:end] in by_text)
        end = next(fits, None)
        if end is None:
            return ()
        found.append(by_text[text[:end]])
        text = text[end:]
    return tuple(found)


def special_rows(
    tokenizer: PreTrainedTokenizerBase, donor: PreTrainedTokenizerBase, donor_size: int
) -> dict[int, tuple[int, ...]]:
    """The donor's row of each special token, or none."""
    theirs, texts = donor.get_vocab(), texts_of(tokenizer)
    found = {}
    for spelled, token in tokenizer.get_vocab().items():
        if token in texts:
            continue
        alike = (getattr(donor, role) for role in ROLES if getattr(tokenizer, role) == token)
        rows = [row for row in (theirs.get(spelled), *alike) if row is not None]
        found[token] = tuple(row for row in rows[:1] if row < donor_size)
    return found


@torch.no_grad()
def matched_rows(weight: Tensor, matches: Matches) -> Tensor:
    """The rows of the new vocabulary, each the mean of the donor's that it is matched with.

    Shapes: [V of the donor, ...] -> [V, ...].
    """
    flat = torch.tensor([row for own in matches.rows for row in own], dtype=torch.long)
    starts = torch.tensor([0, *accumulate(map(len, matches.rows))])[:-1]
    rows = weight.reshape(len(weight), -1)
    means = F.embedding_bag(flat, rows, starts, mode="mean")
    unmatched = torch.tensor([not own for own in matches.rows])
    means[unmatched] = rows[list(matches.known)].mean(0)
    return means.reshape(len(means), *weight.shape[1:])


@torch.no_grad()
def adopt_tokens(model: PreTrainedModel, matches: Matches) -> None:
    """Give a model another vocabulary, embeddings and output by `matched_rows`."""
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    wanted = [
        {name: matched_rows(value, matches) for name, value in layer.named_parameters()}
        for layer in layers
    ]
    model.resize_token_embeddings(len(matches.rows), mean_resizing=False)
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    for layer, values in zip(layers, wanted, strict=True):
        for name, parameter in layer.named_parameters():
            parameter.copy_(values[name])
