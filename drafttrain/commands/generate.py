"""Decode texts and show them as their tokens are committed: plain, round by round, or as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers import TextStreamer

from drafttrain.build.method import build_method, build_sampling
from drafttrain.build.pairing import check_methods
from drafttrain.build.pairs import load_pair
from drafttrain.config.base import counted
from drafttrain.config.commands import GenerateConfig
from drafttrain.data.inputs.chats import Refused
from drafttrain.data.inputs.clips import AUDIO, hear
from drafttrain.data.inputs.prompts import load_prompts
from drafttrain.data.shards.writing import say
from drafttrain.decoding.engine.engine import compile_calls
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.types import Round
from drafttrain.evaluation.metrics import accepted_tokens, round_facts
from drafttrain.evaluation.prompts import is_cut, usable_tokens
from drafttrain.models.loading import report_generate_defaults

CLOSED_PIPE = 141
"""Exit code when the reader of the output has gone: what a shell reports for SIGPIPE."""


def generate_texts(settings: GenerateConfig, texts: Sequence[str] | None, display: str) -> None:
    """Decode texts (None: the rows of settings.data) and write them to standard output, in order.

    display: text, rounds or json. In a file or pipe the texts of several inputs have a line each,
    empty for a row that cannot be decoded. Raises ConfigError, before any model loads, for inputs
    that cannot be read, or none of which holds anything.
    """
    inputs = load_prompts(settings.data, settings.target, texts=texts)
    if texts is not None:
        inputs.info.description = ""  # no columns to tell of
    if display == "text" and len(inputs) > 1 and not sys.stdout.isatty():
        display = "lines"
    pair = load_pair(settings.target, *check_methods(settings.decode))
    method, target = build_method(settings.decode, pair), pair.target
    sampling = settings.decode.sampling
    report_generate_defaults(target, sampling.temperature)
    tokens = usable_tokens(target, inputs, pair.model.source_limit)
    ready = [(place, ids) for place, ids in enumerate(tokens) if not isinstance(ids, Refused)]
    numbers = [inputs[place]["row"] for place, _ in ready]
    decoder = method.decoder(
        pair.model, build_sampling(sampling), sampling.seed, numbers.__getitem__
    )
    compile_calls(settings.compile)
    sources = (  # features of a clip take 1 MB
        hear(target, inputs[place])
        if AUDIO in inputs.column_names
        else make_source(ids, target.model)
        for place, ids in ready
    )
    limit, size = sampling.max_new_tokens, settings.batch_size
    played = in_order(decoder.decode(sources, limit, size), len(ready))
    try:
        if display == "rounds":
            Console(highlight=False).print(LEGEND)
        for row, text, ids in zip(inputs["row"][:], inputs["source"][:], tokens, strict=True):
            if isinstance(ids, Refused):
                show_skipped(display, row, text, ids.reason)
                continue
            new: list[int] = []
            DISPLAYS[display](target.tokenizer, row, text, collected(next(played), new))
            if is_cut(pair.model, new, limit):
                say(f"row {row}: cut after {len(new)} tokens, where the target's positions end")
    except BrokenPipeError:  # the reader of the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        raise SystemExit(CLOSED_PIPE) from None
    except ValueError as error:
        which = "input" if settings.batch_size == 1 else "a batch of inputs from"
        raise ValueError(f"{which} {row}: {error}") from error


def collected(rounds: Iterable[Round], tokens: list[int]) -> Iterator[Round]:
    """The rounds as they come; their tokens go to the end of the list."""
    for played in rounds:
        tokens += played.emitted
        yield played


def in_order(rounds: Iterable[Round], sequences: int) -> Iterator[Iterator[Round]]:
    """The rounds of each sequence, in the order of the sources.

    Rounds of the first sequence that has not ended come as they are done; those of later ones wait.
    """
    coming, waiting = iter(rounds), defaultdict[int, deque[Round]](deque)

    def rounds_of(number: int) -> Iterator[Round]:
        while True:
            while not waiting[number]:
                played = next(coming)
                waiting[played.sequence].append(played)
            played = waiting[number].popleft()
            yield played
            if played.finished:
                return

    return map(rounds_of, range(sequences))


def show_text(tokenizer: Tokenizer, row: int, text: str, rounds: Iterable[Round]) -> None:
    """The text on a line; on a terminal as it is decoded, as far as later tokens rarely change it.

    A clean-up rule of a tokenizer may still change a word: files and pipes get the whole text, once
    it is decoded.
    """
    if not sys.stdout.isatty():
        print(facts_of(tokenizer, list(rounds))["text"], flush=True)
        return
    stream = TextStreamer(tokenizer, skip_special_tokens=True)
    for played in rounds:
        stream.put(torch.tensor(played.emitted))
    stream.end()


def show_lines(tokenizer: Tokenizer, row: int, text: str, rounds: Iterable[Round]) -> None:
    r"""The text on one line: line breaks in it are written as \n and \r."""
    found = facts_of(tokenizer, list(rounds))["text"]
    print(found.replace("\n", r"\n").replace("\r", r"\r"), flush=True)


def show_skipped(display: str, row: int, text: str, reason: str) -> None:
    """The place of a row that is not decoded: an empty line, or its reason."""
    if display == "json":
        print(json.dumps({"row": row, "source": text, "skipped": reason}, ensure_ascii=False))
    else:
        print(f"\n{row}: skipped, {reason}" if display == "rounds" else "", flush=True)


def show_rounds(tokenizer: Tokenizer, row: int, text: str, rounds: Iterable[Round]) -> None:
    """Every round on a line (SpecDec, Table 16), then the text and its mean acceptance length."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(f"\n{text}", style="bold"))
    shown = []
    for played in rounds:
        shown.append(played)
        console.print(show_round(len(shown), played, tokenizer))
    facts = facts_of(tokenizer, shown)
    console.print(Text(f"  = {facts['text']}"))
    mean, counts = facts["mean_acceptance_length"], counted(len(facts["tokens"]), "token")
    counts += f" in {counted(len(shown), 'round')}, {mean:.2f} a round, {facts['seconds']:.2f} s"
    console.print(Text(f"    {counts}", style="dim"))


def show_json(tokenizer: Tokenizer, row: int, text: str, rounds: Iterable[Round]) -> None:
    """One JSON object on a line; of draft trees also which nodes were accepted."""
    line = {"row": row, "source": text, **facts_of(tokenizer, list(rounds))}
    print(json.dumps(line, ensure_ascii=False), flush=True)


DISPLAYS = {"text": show_text, "lines": show_lines, "rounds": show_rounds, "json": show_json}


def facts_of(tokenizer: Tokenizer, rounds: Sequence[Round]) -> dict[str, Any]:
    """What was decoded in the rounds of a sequence, as JSON has it."""
    tokens = [token for played in rounds for token in played.emitted]
    return {
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens": tokens,
        "rounds": [round_facts(played) for played in rounds],
        "mean_acceptance_length": len(tokens) / len(rounds),
        "seconds": round(sum(one.draft_seconds + one.target_seconds for one in rounds), 6),
    }


def readable_pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
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


LEGEND = (
    "[dim]round, accepted of drafted: [/][green]accepted draft[/]  "
    "+[bold yellow]the target's own token[/]  ×[red strike]rejected draft[/]"
)


def show_round(number: int, played: Round, tokenizer: Tokenizer) -> Text:
    """One line for a round, readable without colour too."""
    count = accepted_tokens(played)
    rejected = [t for node, t in enumerate(played.drafted) if node not in played.path[:count]]
    pieces = readable_pieces(tokenizer, played.emitted)
    line = Text(f"{number:>3} {count:>3}/{len(played.drafted):<3}")
    line.append(" ".join(pieces[:count]), style="green")
    for piece in pieces[count:]:
        line.append(" +").append(piece, style="bold yellow")
    if rejected:
        line.append("  ×").append(" ".join(readable_pieces(tokenizer, rejected)), "red strike")
    return line
