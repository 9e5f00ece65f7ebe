"""Given settings are read or refused by name; numbers have bounds that fit real machines."""

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from annotated_types import Le, Lt
from pydantic import TypeAdapter, ValidationError

from drafttrain.config import commands, decode, inputs, policy, recipes
from drafttrain.config.base import Config, ConfigError, CountsFor, plain_types, settings_class
from drafttrain.config.commands import DistillConfig, EvalConfig, TuneConfig
from drafttrain.config.reading import load_settings, settings_of_group, validate_settings
from drafttrain.config.recipes import CausalDrafterRecipe, SpecDrafterRecipe, TargetRecipe
from drafttrain.config.runs import fill_eval

MODULES = (commands, decode, inputs, policy, recipes)
KINDS = {
    kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Config)
}
UNBOUNDED = {"shard_rows", "skip", "limit", "extra_body"}
"""Numbers of rows, which need no memory beyond the existing rows, and a server's own settings."""
DISTILL = ["target.path=t", "data.path=d", "out=o"]
EVAL = ["target.path=t", "data.path=d", "decode.drafter=max-gram", "report=r.json"]
TRAIN = ["run=r", "target.path=t", "data.path=d"]
UNREAD = [
    (DistillConfig, DISTILL, "num_beams=3", "method=beam"),
    (DistillConfig, DISTILL, "sampling.temperature=1", "method=sample"),
    (DistillConfig, [*DISTILL, "method=beam"], "sampling.top_p=0.5", "method=sample"),
    (DistillConfig, DISTILL, "server.concurrency=2", "backend=server"),
    (DistillConfig, [*DISTILL, "backend=transformers"], "server.url=http://a/v1", "backend=server"),
    (DistillConfig, [*DISTILL, "backend=transformers"], "batch_rows=9", "backend=engine"),
    (DistillConfig, [*DISTILL, "backend=engine"], "batch_tokens=99", "backend=transformers"),
    (DistillConfig, [*DISTILL, "server.url=http://a/v1"], "target.dtype=float16", "backend="),
    (EvalConfig, EVAL, "decode.sampling.top_k=5", "decode.sampling.temperature=..."),
    (EvalConfig, [*EVAL, "mode=teacher-forced"], "repeats=2", "mode=decode"),
    (EvalConfig, EVAL, "others={x: {drafter: d, sampling: {top_k: 5}}}", "others.x.sampling."),
    (CausalDrafterRecipe, TRAIN, "teacher.top_k=4", "teacher.kind=cached"),
    (CausalDrafterRecipe, [*TRAIN, "initialise.path=m"], "drafter.layers=3", "ise.path=null"),
    (SpecDrafterRecipe, [*TRAIN, "drafter.slots=paper"], "objective.prefix_weight=1", "anchored"),
    (TargetRecipe, [*TRAIN[::2], "model={}", "teacher.path=t"], "vocab_size=99", "teacher=null"),
]


@pytest.mark.parametrize(
    ("kind", "others", "given", "remedy"),
    UNREAD,
    ids=[f"{one[0].__name__} {one[2]}" for one in UNREAD],
)
def test_a_setting_without_effect_is_refused(kind, others, given, remedy):
    with pytest.raises(ConfigError) as refused:
        load_settings(kind, None, [*others, given])
    name = given.partition("=")[0]
    assert str(refused.value).startswith(name) and "is used only with" in str(refused.value)
    assert remedy in str(refused.value)


def test_a_group_of_a_recipe_is_held_to_the_same():
    fixed = {"target": {"path": "t"}, "data": {"path": "d"}, "out": "o"}
    with pytest.raises(ConfigError, match=r"^distill\.num_beams = 3 .* distill\.method=beam"):
        settings_of_group(DistillConfig, "distill", {"num_beams": 3}, fixed)
    given = {"num_beams": 3, "method": "beam"}
    assert settings_of_group(DistillConfig, "distill", given, fixed).num_beams == 3


def test_default_values_without_effect_are_accepted(tmp_path):
    nothing = ["sampling.temperature=0", "sampling.top_k=0", "server={}"]
    assert load_settings(DistillConfig, None, [*DISTILL, *nothing]).sampling.top_k == 0
    file = tmp_path / "settings.yaml"
    file.write_text("num_beams: 5\nsampling: {top_p: 1.0}\nbatch_rows: 32\n")
    assert load_settings(DistillConfig, file, DISTILL).num_beams == 5
    file.write_text("num_beams: 4\n")
    with pytest.raises(ConfigError, match="num_beams = 4 is used only with method=beam"):
        load_settings(DistillConfig, file, DISTILL)


def test_a_run_can_supply_the_setting_that_a_condition_needs():
    fill = {"sampling": {"temperature": 0.7, "top_k": 4}, "drafter": "d"}
    settings = load_settings(TuneConfig, None, ["sampling.top_k=4"], None, lambda values: fill)
    assert settings.sampling.top_k == 4


@pytest.mark.parametrize(
    ("decode", "sweep", "name"),
    [
        ({"stop": {"k": 3}}, {"k": "2,4"}, r"decode\.stop\.k = 3"),
        ({"stop": {"head": "h"}}, {"k": "2,4"}, r"decode\.stop\.head"),
        ({"stop": {"max_draft": 9}}, {"k": "2,4"}, r"decode\.stop\.max_draft = 9"),
        ({"verifier": {"beta": 3}}, {"beta": "1,2"}, r"decode\.verifier\.beta = 3"),
    ],
)
def test_settings_that_a_sweep_does_not_use_are_refused(decode, sweep, name):
    values = {"target": {"path": "t"}, "data": {"path": "d"}, "sweep": sweep}
    with pytest.raises(ConfigError, match=f"^{name}"):
        fill_eval(values | {"decode": {"drafter": "max-gram", **decode}})


def test_every_condition_is_about_settings_that_exist():
    for kind in KINDS:
        for name, field in kind.model_fields.items():
            for mark in (one for one in field.metadata if isinstance(one, CountsFor)):
                group = (mark.attribute or mark.remedy.partition("=")[0]).partition(".")[0]
                assert group in kind.model_fields or hasattr(kind, group), (kind, name)
                below = settings_class(field.annotation)
                assert not mark.names or set(mark.names) <= below.model_fields.keys(), (kind, name)


def test_every_integer_has_an_upper_bound():
    for kind in KINDS:
        for name, field in kind.model_fields.items():
            if name not in UNBOUNDED:
                for bounds in integers(field.annotation, field.metadata):
                    assert any(isinstance(one, Le | Lt) for one in bounds), (kind, name)


def integers(annotation: Any, bounds: list[Any]) -> Iterator[list[Any]]:
    """Yields the bounds of each plain integer in an annotation."""
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        inner = [two for one in parts[1:] for two in getattr(one, "metadata", [one])]
        yield from integers(parts[0], bounds + inner)
    elif annotation is int:
        yield bounds
    elif kind in (Union, types.UnionType):
        for part in parts:
            yield from integers(part, bounds)
    elif kind is not Literal:
        for part in parts:
            yield from integers(part, [])


@pytest.mark.parametrize("name", ["data.limit", "decode.stop.k", "decode.sampling.temperature"])
def test_true_is_no_number(name):
    with pytest.raises(ConfigError, match=f"{name} = True: a number is needed"):
        load_settings(EvalConfig, None, [*EVAL, f"{name}=true"])
    assert load_settings(EvalConfig, None, [*EVAL, "data.chat=true"]).data.chat


@pytest.mark.parametrize("name", ["k", "max_draft"])
@pytest.mark.parametrize("value", [1025, 10**9, 10**30])
def test_a_draft_longer_than_any_machine_verifies_is_refused(name, value):
    with pytest.raises(ConfigError, match=rf"stop\.{name} = {value}: .*1024"):
        validate_settings(EvalConfig, {"decode": {"stop": {name: value}}})
    with pytest.raises(ValidationError):
        policy.Policy(stop="entropy", entropy=1.0, **{name: value})


def test_a_leading_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    fields = [one for kind in KINDS for one in kind.model_fields.values()]
    fields = [field for field in fields if Path in plain_types(field.annotation)]
    for field in fields:
        adapter = TypeAdapter(Annotated[field.annotation, field])
        assert adapter.validate_python("~/x") == Path("/home/me/x")
    assert len(fields) > 10
    given = inputs.DataConfig(path="~/a.en", reference_path="~/a.de")
    assert (given.path, given.reference_path) == ("/home/me/a.en", "/home/me/a.de")
    assert decode.DecodeConfig(bigrams="~/x").bigrams == "/home/me/x"
    assert decode.StopConfig(head="~/x").head == "/home/me/x"
