"""How servers are asked in turn, and what their answers come to."""

from __future__ import annotations

import threading

import pytest

from drafttrain.data.servers.programs import LLAMA_CPP, VLLM, Question, read_counters
from drafttrain.data.servers.transport import Connection, Unanswered, read_address
from drafttrain.evaluation.bench.measure import (
    Asked,
    Side,
    Wave,
    measure_level,
    play,
    shared_out,
)
from drafttrain.evaluation.bench.report import level_of
from tests.evaluation.bench.fake_llama import ACCEPTED, DRAFTED, MADE, FakeLlama, serving


def question(number: int) -> Question:
    return Question("", (4, number), 16, 0.0, 0, 1.0, 1.0, None)


def side_of(fake: FakeLlama, lines: int = 4, timeout: float = 30.0) -> Side:
    address = read_address(fake.url)
    connections = [Connection(address, timeout) for _ in range(lines)]
    program = VLLM if fake.owner == "vllm" else LLAMA_CPP
    return Side("with" if fake.drafts else "without", program, "tiny", connections)


def test_prompts_are_asked_in_turn_and_the_first_one_changes():
    with serving(FakeLlama(), FakeLlama(drafts=True)) as fakes:
        sides = [side_of(fake) for fake in fakes]
        waves = measure_level(sides, [question(n) for n in range(4)], 1)
    assert fakes[0].order == ["without", "with", "with", "without"] * 2
    assert fakes[0].prompts == fakes[1].prompts == [(4, n) for n in range(4)]
    assert [len(own) for own in waves] == [4, 4]
    answer = waves[1][0].answers[0]
    assert answer.tokens == waves[0][0].answers[0].tokens and answer.made_tokens == MADE
    assert (answer.draft_tokens, answer.accepted_tokens) == (DRAFTED, ACCEPTED)
    assert 0.0 < answer.first_seconds <= answer.seconds


def test_as_many_are_asked_at_once_as_is_said():
    fake, three = FakeLlama(), threading.Barrier(3, timeout=60)
    fake.trouble = lambda number: [three.wait(), None][1]  # answered once three are asked
    with serving(fake):
        [[wave]] = measure_level([side_of(fake)], [question(n) for n in range(9)], 3)
        assert not [one for one in threading.enumerate() if "(work)" in one.name]
    assert fake.most_at_once == 3
    assert sorted(fake.prompts) == [(4, n) for n in range(9)]
    assert len(wave.answers) == 9 and wave.draft_tokens is None


def test_counters_of_vllm_are_those_of_the_wave():
    """Two engines, each of which has counted DRAFTED a question."""
    fake = FakeLlama(drafts=True, owner="vllm")
    with serving(fake):
        side = side_of(fake)
        play(side, [question(0)], 1)
        wave = play(side, [question(1), question(2)], 2)
    assert (wave.draft_tokens, wave.accepted_tokens) == (4 * DRAFTED, 4 * ACCEPTED)
    assert read_counters(fake.metrics())["vllm:spec_decode_num_drafts_total"] == 9.0


def test_every_level_has_prompts_of_its_own():
    prompts = [question(n) for n in range(11)]
    first, parts = shared_out(prompts, 3, warmup=2)
    asked = [one.prompt for part in (first, *parts) for one in part]
    assert len(first) == 2 and [len(part) for part in parts] == [3, 3, 3]
    assert sorted(asked) == [one.prompt for one in prompts]


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        (500, "500: 'out of memory'"),
        ("<html>hello</html>", "no event but '<html>hello</html>'"),
        ('data: {"text": "x"}\n\n', "an answer of another shape than /completion has (KeyError"),
        ("data: [1]\n\n", "an answer of another shape"),
        ("", "does not say of how many tokens"),
        ("data: not json\n\n", "no event but 'data: not json'"),
        (3.0, "no answer within 0.5 s"),
    ],
)
def test_troubles_are_one_line_and_end_the_wave(trouble, says):
    fake = FakeLlama()
    fake.trouble = lambda number: trouble if number == 2 else None
    limit = 0.5 if trouble == 3.0 else 30.0
    with serving(fake), pytest.raises(Unanswered) as failure:
        play(side_of(fake, timeout=limit), [question(n) for n in range(6)], 2)
    assert says in str(failure.value) and "\n" not in str(failure.value)


def test_a_line_that_failed_is_not_used_for_the_next_answer():
    """What is left of a broken answer is not read as the next one."""
    fake = FakeLlama()
    fake.trouble = lambda number: "data: {}\n\n" + "data: {}\n\n" * 99 if number == 0 else None
    with serving(fake):
        side = side_of(fake, lines=1)
        with pytest.raises(Unanswered):
            play(side, [question(0)], 1)
        assert play(side, [question(1)], 1).answers[0].made_tokens == MADE


def test_figures_are_those_worked_out_by_hand():
    """Plain: 16 tokens in 4 s. Drafted: 16 in 2 s, 6 of 12 accepted: 14 tokens in 8 calls."""
    plain = [Wave([Asked(8, 2.0, 0.25, (1, 2))], 2.0, None, None)] * 2
    drafted = [Wave([Asked(8, 1.0, 0.3, (1, 2), 6, 3)], 1.0, 6, 3)] * 2
    sides = [Side(name, LLAMA_CPP, "tiny", ()) for name in ("without", "with")]
    level = level_of(sides, [plain, drafted], 1, greedy=True, resamples=10)
    without, with_drafter = level.sides
    value = {name: one.value for name, one in with_drafter.metrics.items()}
    assert without.metrics["tokens_per_second"].value == 4.0
    assert without.metrics["ms_to_first_token"].value == 250.0
    assert without.metrics["tokens_per_second_per_user"].value == 4.0
    assert "speedup" not in without.metrics and "tokens_per_step" not in without.metrics
    assert value["tokens_per_second"] == 8.0 and value["speedup"] == 2.0
    assert value["tokens_per_second_per_user"] == pytest.approx(10.0)
    assert value["draft_acceptance_rate"] == 0.5 and value["tokens_per_step"] == 14 / 8
    assert (level.compared, level.identical) == (2, 2)
    assert with_drafter.totals == {
        "prompts": 2,
        "tokens": 16,
        "draft_tokens": 12,
        "accepted_tokens": 6,
    }
