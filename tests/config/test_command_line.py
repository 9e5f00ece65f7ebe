"""Recorded command lines: the program's name only, and private folders by their last part."""

import pytest

from drafttrain.config.command_line import describe_command, hide_folders


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/home/me/.venv/bin/drafttrain", "eval", "--limit", "5"], "drafttrain eval --limit 5"),
        (["/home/me/drafttrain/__main__.py", "tune"], "drafttrain tune"),
        (
            ["/home/me/code/recipes/train_spec_drafter.py", "--config", "recipes/quickstart.yaml"],
            "accelerate launch recipes/train_spec_drafter.py --config recipes/quickstart.yaml",
        ),
        (["benchmarks/train.py", "--steps", "2"], "python benchmarks/train.py --steps 2"),
        (["/home/me/mine.py"], "python mine.py"),
        (["drafttrain", "eval", "sweep={k: [1]}"], "drafttrain eval 'sweep={k: [1]}'"),
        ([], ""),
    ],
)
def test_the_program_is_shown_as_others_call_it(words, shown):
    assert describe_command(words) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/data/test.jsonl", "test.jsonl"),
        ("/home/me/checkpoints/mine/final", "mine/final"),
        ("--report=/tmp/a/report.json", "--report=report.json"),
        ("decode.tree.drafters=[/a/b,c/d,/e/f]", "decode.tree.drafters=[b,c/d,f]"),
        ('data={"path": "/home/me/x.en.gz", "limit": 4}', 'data={"path": "x.en.gz", "limit": 4}'),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("increments=5,3,0/4,10/10", "increments=5,3,0/4,10/10"),
    ],
)
def test_absolute_paths_are_shortened_to_their_last_part(text, shown):
    assert hide_folders(text) == shown
