"""Streaming of text and the account of a round, as `drafttrain generate` shows them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.cli import main
from drafttrain.commands.generate import (
    DISPLAYS,
    RoundParts,
    TextStream,
    readable_pieces,
    show_round,
    split_round,
)
from drafttrain.commands.in_order import InOrder, SequenceRounds
from drafttrain.decoding.types import Round, Sampling
from tests.commanding import ended
from tests.tiny_targets import tiny_tokenizer

GREEDY = Sampling()


def decode_bytes(tokens: Sequence[int]) -> str:
    """One token a byte, as byte-level tokenizers have it."""
    return bytes(tokens).decode("utf-8", errors="replace")


@given(st.text(max_size=40), st.lists(st.integers(1, 5), max_size=40))
def test_streamed_text_is_the_decoded_text_however_rounds_cut_it(text, cuts):
    tokens = list(text.encode("utf-8", errors="ignore"))
    stream, pieces, start = TextStream(decode_bytes), [], 0
    for cut in cuts:
        pieces.append(stream.push(tokens[start : start + cut]))
        start += cut
    pieces.append(stream.push(tokens[start:]))
    pieces.append(stream.finish())
    assert "".join(pieces) == decode_bytes(tokens)


@given(st.lists(st.integers(0, 255), max_size=40), st.lists(st.integers(1, 5), max_size=40))
def test_bytes_that_never_become_characters_are_streamed_as_they_are_decoded(tokens, cuts):
    stream, pieces, start = TextStream(decode_bytes), [], 0
    for cut in cuts:
        pieces.append(stream.push(tokens[start : start + cut]))
        start += cut
    pieces.append(stream.push(tokens[start:]))
    assert "".join([*pieces, stream.finish()]) == decode_bytes(tokens)


def test_a_half_character_is_never_shown():
    stream = TextStream(decode_bytes)
    first, second = "ein é ".encode()[:5], "ein é ".encode()[5:]
    assert stream.push(list(first)) == "ein"
    assert stream.push(list(second)) == " é"
    assert stream.finish() == " "


def test_a_word_is_shown_when_the_next_one_begins():
    words = {0: "walk", 1: "ing", 2: " home"}
    stream = TextStream(lambda tokens: "".join(words[token] for token in tokens))
    assert stream.push([0]) == ""
    assert stream.push([1]) == ""
    assert stream.push([2]) == "walking"
    assert stream.finish() == " home"


def test_lines_and_characters_of_scripts_without_spaces_are_shown_as_they_come():
    stream = TextStream(decode_bytes)
    assert stream.push(list(b"a = 1\nb")) == "a = 1"
    assert stream.finish() == "\nb"
    stream, text = TextStream(decode_bytes), "家は小さい".encode()
    assert stream.push(list(text[:5])) == "家"
    assert stream.push(list(text[5:])) == "は小さい"


def test_a_space_that_a_clean_up_rule_takes_away_was_not_given_out():
    words = {0: "do", 1: " n", 2: "'t go"}
    stream = TextStream(lambda tokens: "".join(map(words.get, tokens)).replace(" n't", "n't"))
    assert stream.push([0, 1]) == "do"
    assert stream.push([2]) == "n't"
    assert stream.finish() == " go"


def test_text_that_was_rewritten_further_back_is_given_again_whole():
    states = {1: "one two three", 2: "uno two three"}
    stream = TextStream(lambda tokens: states[len(tokens)])
    assert stream.push([0]) == "one two"
    assert stream.push([0]) == ""
    assert stream.finish() == "\nuno two three"


def played(drafted: list[int], accepted: int, emitted: list[int]) -> Round:
    return Round(sequence=0, drafted=drafted, path=list(range(accepted)), emitted=emitted)


def test_a_round_splits_into_accepted_added_and_rejected():
    assert split_round(played([5, 6, 7], 1, [5, 9])) == RoundParts([5], [9], [6, 7])
    assert split_round(played([5, 6], 2, [5, 6, 9])) == RoundParts([5, 6], [9], [])
    assert split_round(played([], 0, [9])) == RoundParts([], [9], [])


def test_what_a_draft_holds_past_eos_is_not_accepted():
    assert split_round(played([5, 1, 7], 3, [5, 1])) == RoundParts([5, 1], [], [7])


class ByteTokenizer:
    """One token a byte, as byte-level tokenizers have it."""

    def convert_ids_to_tokens(self, tokens: list[int]) -> list[str]:
        return [f"<0x{token:02X}>" for token in tokens]

    def decode(self, tokens: list[int], **_: object) -> str:
        return decode_bytes(tokens)


def test_pieces_of_a_round_are_text_and_halves_of_characters_are_marked():
    assert readable_pieces(ByteTokenizer(), list("a é\n".encode())) == [
        "a",
        "▁",
        "\ufffd",
        "\ufffd",
        "↵",
    ]
    assert readable_pieces(tiny_tokenizer(), [9, 1]) == ["w9", "</s>"]


def test_colours_tell_accepted_added_and_rejected_tokens_apart():
    line = show_round(1, played([5, 6, 7], 1, [5, 9]), lambda tokens: [f"t{t}" for t in tokens])
    colours = {line.plain[span.start : span.end].strip(): str(span.style) for span in line.spans}
    assert colours == {"t5": "green", "t9": "bold yellow", "t6 t7": "red strike"}


def alone(rounds: list[Round]) -> SequenceRounds:
    """The rounds of a sequence that is decoded alone."""
    [sequence] = InOrder(iter(rounds), 1, 1)
    return sequence


def screen_of(display: str, capsys) -> str:
    """What a display writes for three scripted rounds of the tiny tokenizer."""
    rounds = [played([5, 6, 7], 1, [5, 9]), played([8], 1, [8, 4]), played([], 0, [1])]
    DISPLAYS[display](tiny_tokenizer(), 3, "w30 w31", alone(rounds), GREEDY)
    return capsys.readouterr().out


def test_the_text_of_rounds_is_one_line(capsys):
    assert screen_of("text", capsys) == "w5 w9 w8 w4\n"


def test_a_line_of_json_holds_every_round(capsys):
    line = json.loads(screen_of("json", capsys))
    seconds = line.pop("seconds")
    assert seconds >= 0
    assert line == {
        "row": 3,
        "temperature": 0.0,
        "source": "w30 w31",
        "text": "w5 w9 w8 w4",
        "tokens": [5, 9, 8, 4, 1],
        "rounds": [
            {"drafted": [5, 6, 7], "accepted": 1, "emitted": [5, 9]},
            {"drafted": [8], "accepted": 1, "emitted": [8, 4]},
            {"drafted": [], "accepted": 0, "emitted": [1]},
        ],
        "mean_acceptance_length": 5 / 3,
    }


def test_rounds_are_shown_with_what_was_drafted_accepted_and_corrected(capsys):
    lines = screen_of("rounds", capsys).splitlines()
    assert lines[:6] == [
        "",
        "w30 w31",
        "  1   1/3  w5 +w9  ×w6 w7",
        "  2   1/1  w8 +w4",
        "  3   0/0   +</s>",
        "  = w5 w9 w8 w4",
    ]
    assert "5 tokens in 3 rounds, 1.67 a round" in lines[6]


def test_a_reader_that_goes_away_ends_it_without_a_word(tiny_target):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "drafttrain.cli", "generate", "--target", str(tiny_target)]
    command += ["--drafter", "none", "--text", "w5 w6"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("display", DISPLAYS)
def test_every_display_leaves_a_closed_pipe_to_the_command(monkeypatch, display):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    with pytest.raises(BrokenPipeError):
        DISPLAYS[display](tiny_tokenizer(), 0, "w5", alone([played([], 0, [9])]), GREEDY)


@pytest.mark.parametrize(
    ("stdin", "says"),
    [
        (b"", "standard input is empty"),
        (b"\n", "input 0 is empty"),
        (b"w5\n \nw6\n", "input 1 is empty"),
        (b"w5 \xff\n", "standard input is not utf-8: invalid start byte at byte 3"),
    ],
)
def test_wrong_standard_input_is_refused_in_one_line(capsys, monkeypatch, tiny_target, stdin, says):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
    capsys.readouterr()  # what the fixture wrote
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "--target", str(tiny_target), "--drafter", "none"])
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert says in said.err and said.err.count("\n") == 1
    assert said.out == ""


def test_only_line_ends_separate_inputs(capsys, monkeypatch, tiny_target):
    monkeypatch.setattr("sys.stdin", io.StringIO("w5\u2028w6\r\nw7\n"))
    with pytest.raises(SystemExit) as stopped:
        main(
            ["generate", "--target", str(tiny_target), "--drafter", "none", "--json"]
            + ["decode.sampling.max_new_tokens=2"]
        )
    assert stopped.value.code == 0
    written = capsys.readouterr().out.removesuffix("\n").split("\n")
    lines = [json.loads(line) for line in written]
    assert [line["source"] for line in lines] == ["w5\u2028w6", "w7"]


def lines_of(capsys, target, *arguments: str) -> list[dict]:
    texts = [
        argument for text in ("w5 w6", "w9", "w7 w8 w30", "w4") for argument in ("--text", text)
    ]
    command = ["generate", "--target", str(target), *texts, "--json", "--max-new-tokens", "9"]
    assert ended(*command, *arguments) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line.pop("seconds") > 0 for line in lines)
    return lines


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_batches_are_written_in_order_and_equal_single_inputs(capsys, tiny_target, temperature):
    own = ["--drafter", "max-gram", "--temperature", temperature]
    capsys.readouterr()
    single = lines_of(capsys, tiny_target, *own)
    assert [line["row"] for line in single] == [0, 1, 2, 3]
    for size in ("2", "4", "9"):
        assert lines_of(capsys, tiny_target, *own, "--batch-size", size) == single


def test_a_round_is_readable_without_colour():
    line = show_round(2, played([5, 6, 7], 1, [5, 9]), lambda tokens: [f"t{t}" for t in tokens])
    assert line.plain == "  2   1/3  t5 +t9  ×t6 t7"
