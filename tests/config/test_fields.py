"""Settings by their dotted names."""

from __future__ import annotations

import pytest

from drafttrain.config.commands import EvalConfig
from drafttrain.config.decode import CascadeConfig, DecodeConfig, StopConfig
from drafttrain.config.fields import choices, find_field, sentences, setting_names, settings_below


def test_a_dotted_name_leads_through_optional_groups():
    assert find_field(EvalConfig, "decode.stop.k").annotation is int
    assert find_field(EvalConfig, "decode.cascade.leniency").default == 1.0
    with pytest.raises(KeyError):
        find_field(EvalConfig, "decode.stop.kk")
    with pytest.raises(KeyError, match=r"EvalConfig has no 'repeats\.k'"):
        find_field(EvalConfig, "repeats.k")


@pytest.mark.parametrize(
    ("location", "kind"),
    [
        ([], EvalConfig),
        (["decode", "cascade"], CascadeConfig),
        (["others", "a name", "stop"], StopConfig),
        (["others", "a name"], DecodeConfig),
        (["repeats"], None),
        (["sweep", "k"], None),
        (["absent", "stop"], None),
    ],
)
def test_a_path_of_keys_leads_to_a_class_or_to_none(location, kind):
    assert settings_below(EvalConfig, location) is kind


def test_all_names_are_listed_at_every_depth():
    names = setting_names(DecodeConfig)
    assert {"drafter", "stop", "stop.k", "cascade.increments"} <= set(names)
    assert names.index("stop") < names.index("stop.k")


def test_choices_are_those_of_a_literal_and_of_nothing_else():
    assert choices(find_field(EvalConfig, "mode").annotation) == ("decode", "teacher-forced")
    assert choices(find_field(EvalConfig, "repeats").annotation) == ()


def test_sentences_end_where_a_space_follows():
    assert sentences("One 0.5 here,\n  e.g.so. Two? Three") == [
        "One 0.5 here, e.g.so.",
        "Two?",
        "Three",
    ]
    assert sentences(None) == []
