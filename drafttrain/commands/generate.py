"""`drafttrain generate`: decodes texts and shows them as text, round by round, or as JSON."""

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

from drafttrain.build.method import build_method
from drafttrain.build.pairing import check_methods
from drafttrain.build.pairs import load_pair
from drafttrain.config.base import counted
from drafttrain.config.commands import GenerateConfig
from drafttrain.data.inputs.chats import Refused
from drafttrain.data.inputs.clips import AUDIO, clip_source
from drafttrain.data.inputs.prompts import load_prompts
from drafttrain.data.shards.writing import say
from drafttrain.decoding.engine.engine import compile_calls
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.types import Round, Sampling
from drafttrain.evaluation.metrics import accepted_tokens, round_facts
from drafttrain.evaluation.prompts import is_cut, usable_tokens
from drafttrain.models.loading import report_generate_defaults

CLOSED_PIPE = 141
"""Exit code if the reader of standard output has exited; shells report SIGPIPE as this code."""


def generate_texts(settings: GenerateConfig, texts: Sequence[str] | None, display: str) -> None:
    """Decodes texts (None: the rows of settings.data) and writes them to standard output, in order.

    display: text, rounds or json. In a file or pipe, each of several inputs gives one line, empty
    for a row that cannot be decoded. Raises ConfigError, before any model loads, for inputs that
    cannot be read or are all empty.
    """
    inputs = load_prompts(settings.data, settings.target, texts=texts)
    if texts is not None:
        inputs.info.description = ""  # texts have no columns to report
    if display == "text" and len(inputs) > 1 and not sys.stdout.isatty():
        display = "lines"
    pair = load_pair(settings.target, *check_methods(settings.decode))
    method, target = build_method(settings.decode, pair), pair.target
    sampling = settings.decode.sampling
    report_generate_defaults(target, sampling.temperature)
    tokens = usable_tokens(target, inputs, pair.model.source_limit)
    ready = [(index, ids) for index, ids in enumerate(tokens) if not isinstance(ids, Refused)]
    numbers = [inputs[index]["row"] for index, _ in ready]
    decoder = method.decoder(pair.model, Sampling.of(sampling), sampling.seed, numbers.__getitem__)
    compile_calls(settings.compile)
    sources = (  # built one by one, because the features of a clip take 1 MB
        clip_source(target, inputs[index])
        if AUDIO in inputs.column_names
        else make_source(ids, target.model)
        for index, ids in ready
    )
    limit, size = sampling.max_new_tokens, settings.batch_size
    sequences = in_order(decoder.decode(sources, limit, size), len(ready))
    try:
        if display == "rounds":
            Console(highlight=False).print(LEGEND)
        for row, text, ids in zip(inputs["row"][:], inputs["source"][:], tokens, strict=True):
            if isinstance(ids, Refused):
                show_skipped(display, row, text, ids.reason)
                continue
            new: list[int] = []
            DISPLAYS[display](target.tokenizer, row, text, collected(next(sequences), new))
            if is_cut(pair.model, new, limit):
                say(f"row {row}: cut after {len(new)} tokens at the target's maximal length")
    except BrokenPipeError:  # the reader of the output has exited, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        raise SystemExit(CLOSED_PIPE) from None
    except ValueError as error:
        which = "input" if size == 1 else "a batch of inputs from"
        raise ValueError(f"{which} {row}: {error}") from error


def collected(rounds: Iterable[Round], tokens: list[int]) -> Iterator[Round]:
    """Yields the rounds and appends their tokens to the list."""
    for round_ in rounds:
        tokens += round_.emitted
        yield round_


def in_order(rounds: Iterable[Round], sequences: int) -> Iterator[Iterator[Round]]:
    """Returns an iterator over the rounds of each sequence, in the order of the sources.

    Rounds of the first unfinished sequence are yielded immediately; those of later ones are kept.
    """
    incoming, waiting = iter(rounds), defaultdict[int, deque[Round]](deque)

    def rounds_of(number: int) -> Iterator[Round]:
        while True:
            while not waiting[number]:
                round_ = next(incoming)
                waiting[round_.sequence].append(round_)
            round_ = waiting[number].popleft()
            yield round_
            if round_.finished:
                return

    return map(rounds_of, range(sequences))


def show_text(tokenizer: Tokenizer, row: int, text: str, rounds: Iterable[Round]) -> None:
    """Prints the text on a line: on a terminal word by word, else when it is complete, because a
    tokenizer's clean-up may still change a word."""
    if not sys.stdout.isatty():
        print(facts_of(tokenizer, list(rounds))["text"], flush=True)
        return
    stream = TextStreamer(tokenizer, skip_special_tokens=True)
    for round_ in rounds:
        stream.put(torch.tensor(round_.emitted))
    stream.end()


def show_lines(tokenizer: Tokenizer, row: int, text: str, rounds: Iterable[Round]) -> None:
    r"""Prints the text on one line, with its line breaks written as \n and \r."""
    text = facts_of(tokenizer, list(rounds))["text"]
    print(text.replace("\n", r"\n").replace("\r", r"\r"), flush=True)


def show_skipped(display: str, row: int, text: str, reason: str) -> None:
    """Prints an empty line or the reason for a row that is not decoded."""
    if display == "json":
        print(json.dumps({"row": row, "source": text, "skipped": reason}, ensure_ascii=False))
    else:
        print(f"\n{row}: skipped, {reason}" if display == "rounds" else "", flush=True)


def show_rounds(tokenizer: Tokenizer, row: int, text: str, rounds: Iterable[Round]) -> None:
    """Prints a line per round (SpecDec, Table 16), the text and its mean acceptance length."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(f"\n{text}", style="bold"))
    shown = []
    for round_ in rounds:
        shown.append(round_)
        console.print(format_round(len(shown), round_, tokenizer))
    facts = facts_of(tokenizer, shown)
    console.print(Text(f"  = {facts['text']}"))
    mean, counts = facts["mean_acceptance_length"], counted(len(facts["tokens"]), "token")
    counts += f" in {counted(len(shown), 'round')}, {mean:.2f} per round, {facts['seconds']:.2f} s"
    console.print(Text(f"    {counts}", style="dim"))


def show_json(tokenizer: Tokenizer, row: int, text: str, rounds: Iterable[Round]) -> None:
    """Prints one JSON object on a line; for draft trees it includes the accepted nodes."""
    line = {"row": row, "source": text, **facts_of(tokenizer, list(rounds))}
    print(json.dumps(line, ensure_ascii=False), flush=True)


DISPLAYS = {"text": show_text, "lines": show_lines, "rounds": show_rounds, "json": show_json}


def facts_of(tokenizer: Tokenizer, rounds: Sequence[Round]) -> dict[str, Any]:
    """Returns the JSON fields of one decoded sequence."""
    tokens = [token for round_ in rounds for token in round_.emitted]
    return {
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens": tokens,
        "rounds": [round_facts(round_) for round_ in rounds],
        "mean_acceptance_length": len(tokens) / len(rounds),
        "seconds": round(sum(each.draft_seconds + each.target_seconds for each in rounds), 6),
    }


def readable_pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Returns the text of each token; spaces are ▁, line breaks ↵, parts of characters \ufffd."""
    pieces = []
    for token, raw in zip(tokens, tokenizer.convert_ids_to_tokens(list(tokens)), strict=True):
        text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if raw.startswith("▁") and not text.startswith(" "):
            text = f" {text}"  # decoding drops the space of a first word
        pieces.append(text.replace(" ", "▁").replace("\n", "↵") or raw)
    return pieces


LEGEND = (
    "[dim]round, accepted of drafted: [/][green]accepted draft[/]  "
    "+[bold yellow]bonus token[/]  ×[red strike]rejected draft[/]"
)


def format_round(number: int, round_: Round, tokenizer: Tokenizer) -> Text:
    """Returns the line of a round; it can be read without colour too."""
    count = accepted_tokens(round_)
    rejected = [t for node, t in enumerate(round_.drafted) if node not in round_.path[:count]]
    pieces = readable_pieces(tokenizer, round_.emitted)
    line = Text(f"{number:>3} {count:>3}/{len(round_.drafted):<3}")
    line.append(" ".join(pieces[:count]), style="green")
    for piece in pieces[count:]:
        line.append(" +").append(piece, style="bold yellow")
    if rejected:
        line.append("  ×").append(" ".join(readable_pieces(tokenizer, rejected)), "red strike")
    return line
