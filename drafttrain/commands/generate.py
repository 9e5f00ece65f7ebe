"""Decode texts and show them as their tokens are committed: plain, round by round, or as JSON."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NoReturn

from datasets import Dataset
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from drafttrain.build.cascades import other_drafters
from drafttrain.build.method import build_method, build_sampling, check_method
from drafttrain.build.pairs import load_pair
from drafttrain.commands.in_order import InOrder, SequenceRounds
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import GenerateConfig
from drafttrain.config.trees import TREES
from drafttrain.data.inputs.hearing import HeardRows
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.inputs.rows import CHATS
from drafttrain.data.inputs.tokens import tokenize_prompts
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.compiling import compile_calls
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.types import Round, Sampling, Source
from drafttrain.models.loading import LoadedTarget, check_target
from drafttrain.models.speech import hears

Display = Literal["text", "rounds", "json"]

OPEN_END = re.compile(r"\s+\S*\Z|\A\S*\Z")
"""The last word of a text, with the space before it: a later token may change both."""
UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff01-\uff60]")
"""Characters of scripts without spaces between words: each stands by itself."""
CLOSED_PIPE = 141
"""Exit code when the reader of the output has gone: what a shell reports for SIGPIPE."""


def generate_texts(settings: GenerateConfig, texts: Sequence[str] | None, display: Display) -> None:
    """Decode texts (None: the rows of settings.data) and write them to standard output, in order.

    Raises ConfigError before any model loads for inputs that cannot be read or are empty.
    """
    heard = hears(check_target(settings.target))
    inputs = read_inputs(settings, texts, heard)
    rows = list(zip(inputs["row"], inputs["source"], strict=True))
    for row, text in rows:
        if not text.strip():
            raise ConfigError(f"input {row} is empty; leave it out (inputs are counted from 0)")
    check_method(settings.decode)
    drafter = str(settings.decode.drafter)
    trees = TREES[settings.decode.tree.kind].shape is not None
    bigrams = settings.decode.bigrams
    pair = load_pair(settings.target, drafter, other_drafters(settings.decode), trees, bigrams)
    method, target = build_method(settings.decode, pair), pair.target
    sampling = build_sampling(settings.decode.sampling)
    seed, device = settings.decode.sampling.seed, target.model.device
    decoder = Decoder(
        CachedModel(target.model),
        method.drafter,
        method.stop,
        method.verifier,
        sampling,
        lambda number: sequence_randomness(seed, rows[number][0], device),
    )
    compile_calls(settings.compile, settings.batch_size)
    rounds = decoder.decode(
        HeardRows(target, inputs) if heard else tokenised(target, inputs),
        settings.decode.sampling.max_new_tokens,
        settings.batch_size,
    )
    sequences = InOrder(rounds, len(rows), settings.batch_size)
    try:
        if display == "rounds":
            PlainConsole().print(LEGEND)
        for (row, text), sequence in zip(rows, sequences, strict=True):
            DISPLAYS[display](target.tokenizer, row, text, sequence, sampling)
    except BrokenPipeError:
        leave_quietly()
    except ValueError as error:
        which = ", ".join(str(rows[number][0]) for number in sequences.under_way)
        raise ValueError(f"input {which}: {error}") from error


def read_inputs(settings: GenerateConfig, texts: Sequence[str] | None, heard: bool) -> Dataset:
    """The rows to decode. Raises ConfigError for texts where the target hears."""
    if texts is None:
        data = settings.data
        chat = settings.chat or data.chat
        return load_inputs(data.model_copy(update={"chat": chat}), heard=heard)
    if heard:
        raise ConfigError(
            f"target.path = {settings.target.path!r} hears audio, but the inputs are texts; give a "
            "recording, a folder of them, or a jsonl that names them, with --data"
        )
    columns = {"row": list(range(len(texts))), "source": list(texts)}
    if settings.chat:
        columns[CHATS] = [[{"role": "user", "content": text}] for text in texts]
    return Dataset.from_dict(columns)


def tokenised(target: LoadedTarget, inputs: Dataset) -> list[Source]:
    """The sources of texts and chats."""
    decoder_only = not target.model.config.is_encoder_decoder
    tokenized = tokenize_prompts(target.tokenizer, inputs, decoder_only)
    return [make_source(ids, target.model) for ids in tokenized]


def leave_quietly() -> NoReturn:
    """The reader of the output has gone, as `head` does: no error of ours, and no more to do."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    raise SystemExit(CLOSED_PIPE)


class TextStream:
    """Text of a growing list of tokens, handed out only where it can no longer change.

    Tokens are never decoded one by one (pieces of a word, of a character, and clean-up rules would
    come out wrong): all are decoded again, and the new part is given out but for the last word and
    the space before it, which a later token may still change (in scripts without spaces: but for
    what follows the last whole character). `finish` gives the rest.
    """

    def __init__(self, decode_tokens: Callable[[Sequence[int]], str]):
        self._decode = decode_tokens
        self._tokens: list[int] = []
        self._given = ""

    def push(self, tokens: Sequence[int]) -> str:
        """Text that these tokens have made final; often empty."""
        self._tokens.extend(tokens)
        settled = settled_part(self._decode(self._tokens))
        if not settled.startswith(self._given):
            return ""
        new = settled[len(self._given) :]
        self._given = settled
        return new

    def finish(self) -> str:
        """The rest. Where a clean-up rule changed what was given out: a new line with all of it."""
        text = self._decode(self._tokens)
        rest = text[len(self._given) :] if text.startswith(self._given) else f"\n{text}"
        self._given = text
        return rest


def settled_part(text: str) -> str:
    """The text without its last word and the space before it, or up to the last character of a
    script without spaces, whichever is more."""
    end = OPEN_END.search(text).start()
    *_, last = [0, *(found.end() for found in UNSPACED.finditer(text, end))]
    return text[: max(end, last)]


@dataclass(frozen=True)
class RoundParts:
    """A round's tokens by what became of them."""

    accepted: list[int]
    added: list[int]
    """The target's own token: a correction, or a bonus where nothing was rejected."""
    rejected: list[int]


def split_round(played: Round) -> RoundParts:
    """Accepted, added and rejected tokens. A draft past EOS or the maximal length is rejected."""
    accepted = min(len(played.path), len(played.emitted))
    kept = set(played.path[:accepted])
    return RoundParts(
        accepted=list(played.emitted[:accepted]),
        added=list(played.emitted[accepted:]),
        rejected=[token for node, token in enumerate(played.drafted) if node not in kept],
    )


def show_text(
    tokenizer: PreTrainedTokenizerBase,
    row: int,
    text: str,
    rounds: SequenceRounds,
    sampling: Sampling,
) -> None:
    """The text on a line, written as it is decoded."""
    stream = TextStream(partial(tokenizer.decode, skip_special_tokens=True))
    for played in rounds:
        print(stream.push(played.emitted), end="", flush=True)
    print(stream.finish(), flush=True)


class PlainConsole(Console):
    """A console without guesses at what is to be highlighted; it leaves closed pipes to us."""

    def __init__(self) -> None:
        super().__init__(highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def show_rounds(
    tokenizer: PreTrainedTokenizerBase,
    row: int,
    text: str,
    rounds: SequenceRounds,
    sampling: Sampling,
) -> None:
    """Every round on a line (SpecDec, Table 16), then the text and its count of rounds."""
    console = PlainConsole()
    console.print(Text(f"\n{text}", style="bold"))
    tokens: list[int] = []
    number = 0
    for number, played in enumerate(rounds, start=1):
        tokens.extend(played.emitted)
        console.print(show_round(number, played, partial(readable_pieces, tokenizer)))
    console.print(Text(f"  = {tokenizer.decode(tokens, skip_special_tokens=True)}"))
    console.print(
        Text(
            f"    {len(tokens)} tokens in {number} rounds, {len(tokens) / number:.2f} a round, "
            f"{rounds.seconds:.2f} s",
            style="dim",
        )
    )


def show_json(
    tokenizer: PreTrainedTokenizerBase,
    row: int,
    text: str,
    rounds: SequenceRounds,
    sampling: Sampling,
) -> None:
    """One JSON object on a line."""
    played = list(rounds)
    tokens = [token for one in played for token in one.emitted]
    line = {
        "row": row,
        "temperature": sampling.temperature,
        "source": text,
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens": tokens,
        "rounds": [round_facts(one) for one in played],
        "mean_acceptance_length": len(tokens) / len(played),
        "seconds": round(rounds.seconds, 6),
    }
    print(json.dumps(line, ensure_ascii=False), flush=True)


def round_facts(played: Round) -> dict[str, int | list[int]]:
    """A round as JSON shows it; of a tree also which of the drafted tokens were accepted."""
    accepted = len(split_round(played).accepted)
    facts: dict[str, int | list[int]] = {"drafted": list(played.drafted), "accepted": accepted}
    if played.depth is not None:
        facts["path"] = list(played.path[:accepted])
    return facts | {"emitted": list(played.emitted)}


DISPLAYS = {"text": show_text, "rounds": show_rounds, "json": show_json}


def readable_pieces(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """Each token as the text it stands for: a space before it as ▁, a new line as ↵.

    Part of a character, where one is split over tokens, is \ufffd, as tokenizers write it.
    """
    pieces = []
    for token, raw in zip(tokens, tokenizer.convert_ids_to_tokens(list(tokens)), strict=True):
        text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if raw.startswith("▁") and not text.startswith(" "):
            text = f" {text}"  # decoding drops the space of a first word
        pieces.append(text.replace(" ", "▁").replace("\n", "↵") or raw)
    return pieces


LEGEND = Text.assemble(
    ("round, accepted of drafted: ", "dim"),
    ("accepted draft", "green"),
    "  +",
    ("the target's own token", "bold yellow"),
    "  ×",
    ("rejected draft", "red strike"),
)


def show_round(number: int, played: Round, pieces: Callable[[Sequence[int]], list[str]]) -> Text:
    """One line for a round, readable without colour too."""
    parts = split_round(played)
    line = Text(f"{number:>3} {len(parts.accepted):>3}/{len(played.drafted):<3}")
    line.append(" ".join(pieces(parts.accepted)), style="green")
    for piece in pieces(parts.added):
        line.append(" +")
        line.append(piece, style="bold yellow")
    if parts.rejected:
        line.append("  ×")
        line.append(" ".join(pieces(parts.rejected)), style="red strike")
    return line
