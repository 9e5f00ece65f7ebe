"""Streamed text and the display of rounds in `drafttrain generate`."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.commands.generate import DISPLAYS, format_round, in_order, readable_pieces
from drafttrain.commands.shell import quiet_libraries
from drafttrain.decoding.types import Round
from tests.commanding import ended
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target, tiny_tokenizer


def decoded(lengths: list[int], batch_size: int) -> Iterator[Round]:
    """Yields rounds as a decoder does: one of each active sequence in turn."""
    left, waiting, active = list(lengths), list(range(len(lengths))), []
    while waiting or active:
        while waiting and len(active) < batch_size:
            active.append(waiting.pop(0))
        for number in active:
            left[number] -= 1
            token = lengths[number] - left[number]
            yield Round(number, [], [], [token], finished=left[number] == 0)
        active = [number for number in active if left[number] > 0]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(1, 5))
def test_rounds_are_printed_by_sequence_in_order(lengths, batch_size):
    for number, rounds in enumerate(in_order(decoded(lengths, batch_size), len(lengths))):
        found = [(played.sequence, played.emitted) for played in rounds]
        assert found == [(number, [i + 1]) for i in range(lengths[number])]


def test_generate_streams_round_by_round():
    seen = []

    def watched() -> Iterator[Round]:
        for one in decoded([3, 1, 2], 2):
            seen.append(one.sequence)
            yield one

    first, second, third = in_order(watched(), 3)
    next(first)
    assert seen == [0]
    next(first)
    assert seen == [0, 1, 0]
    assert len([*first, *second, *third]) == 4 and seen == [0, 1, 0, 2, 0, 2]


def played(drafted: list[int], accepted: int, emitted: list[int]) -> Round:
    return Round(sequence=0, drafted=drafted, path=list(range(accepted)), emitted=emitted)


class ByteTokenizer:
    """A byte-level tokenizer with one token per byte."""

    def convert_ids_to_tokens(self, tokens: list[int]) -> list[str]:
        return [f"<0x{token:02X}>" for token in tokens]

    def decode(self, tokens: list[int], **_: object) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


def test_pieces_of_a_round_are_text_and_halves_of_characters_are_marked():
    pieces = readable_pieces(ByteTokenizer(), list("a é\n".encode()))
    assert pieces == ["a", "▁", "\ufffd", "\ufffd", "↵"]
    assert readable_pieces(tiny_tokenizer(), [9, 1]) == ["w9", "</s>"]


@pytest.mark.parametrize(
    ("drafted", "path", "emitted", "shown"),
    [
        ([5, 6, 7], [0], [5, 9], "  4   1/3  w5 +w9  ×w6 w7"),
        ([5, 6, 7, 8], [1, 3], [6, 8, 9], "  4   2/4  w6 w8 +w9  ×w5 w7"),  # a tree
        ([5, 1, 7], [0, 1, 2], [5, 1], "  4   2/3  w5 </s>  ×w7"),  # a draft beyond EOS
    ],
)
def test_accepted_added_and_rejected_tokens_are_marked(drafted, path, emitted, shown):
    line = format_round(4, Round(0, drafted, path, emitted), tiny_tokenizer())
    assert line.plain == shown
    if len(path) == 1:
        styles = {line.plain[one.start : one.end].strip(): str(one.style) for one in line.spans}
        assert styles == {"w5": "green", "w9": "bold yellow", "w6 w7": "red strike"}


def screen_of(display: str, capsys) -> str:
    """Returns what a display writes for three scripted rounds of the tiny tokenizer."""
    rounds = [played([5, 6, 7], 1, [5, 9]), played([8], 1, [8, 4]), played([], 0, [1])]
    DISPLAYS[display](tiny_tokenizer(), 3, "w30 w31", rounds)
    return capsys.readouterr().out


@pytest.mark.parametrize("terminal", [False, True])
def test_the_text_of_rounds_is_one_line(capsys, monkeypatch, terminal):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    assert screen_of("text", capsys) == "w5 w9 w8 w4\n"


def test_json_output_has_every_round(capsys):
    line = json.loads(screen_of("json", capsys))
    assert line.pop("seconds") >= 0
    assert line == {
        "row": 3,
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


def test_piped_output_has_one_line_per_input(capsys):
    texts = ("a\nb\r\n", "\\n", "")
    for row, text in enumerate(texts):
        DISPLAYS["lines"](ByteTokenizer(), row, "", [played([], 0, list(text.encode()))])
    assert capsys.readouterr().out == "a\\nb\\r\\n\n\\n\n\n"


def test_settings_of_inputs_count_for_texts_and_standard_input(capsys, monkeypatch, tmp_path):
    target = save_target(tiny_model("llama").float(), tmp_path / "target")
    tokenizer = tiny_tokenizer()
    refusal = "{{ raise_exception(messages[0].content) if thinking else 'w5' }}"
    tokenizer.chat_template = refusal
    tokenizer.save_pretrained(target)
    command = ["generate", "--target", target, "--drafter", "none", "--max-new-tokens", "2"]
    command += ["--chat", "--json", "data.prefix=w7"]
    for thinking in ("false", "true"):
        given = [*command, f"data.chat_template_kwargs={{thinking: {thinking}}}"]
        monkeypatch.setattr("sys.stdin", io.StringIO("w6\n"))
        capsys.readouterr()
        code = ended(*given)
        assert ended(*given, "--text", "w6") == code
        printed = capsys.readouterr()
        if thinking == "true":
            assert code == 2 and printed.err.count("(TemplateError: w7w6)") == 2
        else:
            found = [json.loads(line) for line in printed.out.splitlines()]
            assert code == 0 and [one["source"] for one in found] == ["w7w6"] * 2
    (tmp_path / "chats.txt").write_text("w6\n")
    assert ended(*command, "--data", tmp_path / "chats.txt") == 0
    assert "its answer begins after 'w5'" in capsys.readouterr().err


def test_rounds_show_drafted_accepted_and_corrected_tokens(capsys):
    lines = screen_of("rounds", capsys).splitlines()
    assert lines[:6] == [
        "",
        "w30 w31",
        "  1   1/3  w5 +w9  ×w6 w7",
        "  2   1/1  w8 +w4",
        "  3   0/0   +</s>",
        "  = w5 w9 w8 w4",
    ]
    assert "5 tokens in 3 rounds, 1.67 per round" in lines[6]


def test_a_reader_that_goes_away_ends_it_without_a_word(tiny_target, capsys, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    capsys.readouterr()  # discards the fixture's output
    with os.fdopen(write, "w") as out:  # closing it would fail too, were it still the pipe
        monkeypatch.setattr("sys.stdout", out)
        given = ["--target", tiny_target, "--drafter", "none", "--text", "w5"]
        assert ended("generate", *given) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("stdin", "says"),
    [
        (b"", "no inputs"),
        (b"\n", "row 0: empty"),
        (b"w5 \xff\n", "'utf-8' codec can't decode byte 0xff in position 3: invalid start byte"),
    ],
)
def test_wrong_standard_input_is_refused_in_one_line(capsys, monkeypatch, tiny_target, stdin, says):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
    capsys.readouterr()  # discards the fixture's output
    assert ended("generate", "--target", tiny_target, "--drafter", "none") == 2
    printed = capsys.readouterr()
    assert says in printed.err and printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_batches_are_written_in_order_and_equal_single_inputs(capsys, tiny_target, temperature):
    own = ["--drafter", "max-gram", "--temperature", temperature]
    texts = [f"--text={text}" for text in ("w5 w6", "w9", "w7 w8 w30", "w4")]
    command, found = ["generate", "--target", tiny_target, *own, *texts, "--json"], []
    capsys.readouterr()
    for size in (1, 2, 4, 9):
        assert ended(*command, "--max-new-tokens", 9, "--batch-size", size) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert all(line.pop("seconds") > 0 for line in lines)
        found.append(lines)
    assert [line["row"] for line in found[0]] == [0, 1, 2, 3]
    assert all(lines == found[0] for lines in found)


def test_commands_say_that_a_target_with_beams_is_decoded_with_one(tiny_target, tmp_path, capsys):
    file = tiny_target / "generation_config.json"
    own = {"num_beams": 6, "num_return_sequences": 3, "min_length": 3}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    (tmp_path / "rows.txt").write_text("w5 w6\nw9\n")
    data = ("--data", tmp_path / "rows.txt", "--max-new-tokens", 4)
    drafts, out = ("--drafter", "max-gram"), ("--out", tmp_path / "shards")
    report = ("--report", tmp_path / "report.json", "repeats=1", "warmup=0")
    commands = (("generate", *drafts), ("eval", *drafts, *report), ("distill", *out))
    for place, command in enumerate(commands):
        target = tiny_target.rename(tmp_path / f"target-{place}")  # reported once per path
        assert ended(command[0], "--target", target, *command[1:], *data) == 0
        assert f"target-{place}': by default" in (printed := capsys.readouterr().err), command
        assert "with 6 beams and 3 outputs per input" in printed
        tiny_target = target


def test_plots_need_no_package_of_a_notebook(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    for code in (1, 0):
        line = [sys.executable, "-c", "import matplotlib"]
        assert subprocess.run(line, capture_output=True).returncode == code
        quiet_libraries()


def test_output_lines_stay_aligned_when_inputs_are_skipped(capsys, monkeypatch, tiny_target):
    stdin = "\ufeffw5\u2028w9\r\n \nw6\n\nw7 w8\n".encode()  # U+2028 ends no line
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
    command = ("generate", "--target", tiny_target, "--drafter", "none", "--max-new-tokens", "4")
    capsys.readouterr()
    assert ended(*command) == 0
    printed = capsys.readouterr()
    lines = printed.out.split("\n")
    assert [bool(line) for line in lines] == [True, False, True, False, True, False]
    for skipped in ("2 of 5 rows", "row 1: empty", "row 3: empty"):
        assert skipped in printed.err
    assert ended(*command, "--text", "w5\u2028w9", "--text", "", "--json") == 0
    first, second = map(json.loads, capsys.readouterr().out.strip().split("\n"))
    assert first["text"] == lines[0] and second == {"row": 1, "source": "", "skipped": "empty"}
