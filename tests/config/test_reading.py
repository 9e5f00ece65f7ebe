"""Settings: types of overrides, and errors that name the field and the remedy."""

from operator import attrgetter
from pathlib import Path

import pytest

from drafttrain.config.base import Config, ConfigError
from drafttrain.config.commands import DistillConfig, EvalConfig, ServerConfig
from drafttrain.config.inputs import DataConfig, TargetConfig
from drafttrain.config.reading import dump_settings, load_settings, merge_values, validate_settings
from drafttrain.config.recipes import SpecDrafterRecipe, TrainConfig

NEEDED = ["target.path=t5-small", "data.path=in.txt", "out=shards"]


def yaml_file(folder: Path, text: str) -> Path:
    file = folder / "settings.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_overrides_take_lists_booleans_and_null():
    settings = load_settings(
        TrainConfig, overrides=["trackers=[wandb]", "adam_betas=[0.9, 0.98]", "clip=null"]
    )
    assert settings.trackers == ("wandb",)
    for text in ("1e-3", "0.001", ".001", "1.0e-3"):
        assert load_settings(TrainConfig, None, [f"learning_rate={text}"]).learning_rate == 1e-3
    assert settings.adam_betas == (0.9, 0.98)
    assert settings.clip is None
    assert load_settings(TrainConfig, overrides=["max_steps="]).max_steps is None
    assert load_settings(DataConfig, None, ["path=x", "prefix=", 'suffix="b: "']).prefix == ""
    assert load_settings(TargetConfig, None, ["path=x", "trust_remote_code=on"]).trust_remote_code


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
        ("my data/a.b.txt", "my data/a.b.txt"),
        ("'12'", "12"),
        ("on", True),
        ("???", "???"),
        ("${oc.env:HOME}", "${oc.env:HOME}"),
        ("5,10", "5,10"),
        ("a=b", "a=b"),
        ("Question: ", "Question: "),
        ("### Question: ", "### Question: "),
        ("Question # 1: ", "Question # 1: "),
        ("\n### Response:\n", "\n### Response:\n"),
        (" ", " "),
        ("'Question' # 1", "Question"),
        ("Null", None),
        ("{category: qa}", {"category": "qa"}),
        ("[0.5,0.6]", [0.5, 0.6]),
        ("", None),
    ],
)
def test_a_value_is_read_as_yaml_and_never_resolved(text, value):
    assert merge_values(overrides=[f"data.prefix={text}"]) == {"data": {"prefix": value}}


@pytest.mark.parametrize("text", ["no", "012", "1e3", "[a]", "{a} and", "a: b", "#1"])
@pytest.mark.parametrize("name", ["target.language", "data.prefix", "out", "data.reference_path"])
def test_the_value_of_a_setting_that_is_text_is_not_read_as_yaml(name, text):
    given = {"target.path": "T", "data.path": "D", "out": "shards"} | {name: text}
    overrides = [f"{key}={value}" for key, value in given.items()]
    assert str(attrgetter(name)(load_settings(DistillConfig, None, overrides))) == text


class Mixed(Config):
    number: int | str = 0


@pytest.mark.parametrize(
    ("kind", "override", "value"),
    [
        (DataConfig, "prefix='no # text'", "no # text"),
        (DataConfig, "reference_path=null", None),
        (DataConfig, "reference_path=", None),
        (Mixed, "number=012", 10),
    ],
)
def test_null_quotes_and_settings_that_may_be_numbers_are_read_as_yaml(kind, override, value):
    name, needed = override.partition("=")[0], ["path=D"] if kind is DataConfig else []
    assert getattr(load_settings(kind, None, [*needed, override]), name) == value


@pytest.mark.parametrize(
    ("kind", "text", "overrides", "name", "value"),
    [
        # references stay text and are never resolved
        (DataConfig, "path: a\ntemplate: '${path} ${oc.env:HOME}'", [], "template", None),
        # a mapping replaces the one before it
        (ServerConfig, "extra_body: {a: 4}", ["extra_body={b: 0.5}"], "extra_body", {"b": 0.5}),
        # an empty file or group is filled by overrides and defaults
        (TrainConfig, "", [], "clip", 5.0),
        (DistillConfig, "target:\ndata:\n", NEEDED, "target.path", "t5-small"),
    ],
)
def test_a_file_and_overrides(tmp_path, kind, text, overrides, name, value):
    settings = load_settings(kind, yaml_file(tmp_path, text), overrides)
    assert attrgetter(name)(settings) == (value or "${path} ${oc.env:HOME}")


def message(overrides: list[str], kind=DistillConfig, file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(kind, file, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*NEEDED, "target.zzz=1"], ["unknown setting 'target.zzz'; known here: ", "revision"]),
        (NEEDED[1:], ["setting 'target.path' is missing; give target.path=VALUE or put it in the"]),
        ([*NEEDED, "method=beem"], ["method = 'beem'", "'greedy', 'beam' or 'sample'"]),
        ([*NEEDED, "sampling.temperature=-1"], ["sampling.temperature = -1"]),
        ([*NEEDED, "data.limit=0"], ["data.limit = 0"]),
        (["seed"], ["is not key=value"]),
        (["=3"], ["is not key=value"]),
        ([""], ["is not key=value"]),
        (["method=[1"], ["the value is not valid YAML"]),
        ([*NEEDED, "target.path.revision=main"], ["target.path = {'revision': 'main'}", "string"]),
        ([*NEEDED[1:], "target=t5"], ["target = 't5': this is a group of", "as target.path="]),
    ],
    ids=str,
)
def test_a_wrong_override_is_named_with_the_remedy(overrides, words):
    error = message(overrides)
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("out: a\nout: b\n", ["line 2", "duplicate key out"]),
        ("a: b: c", ["settings.yaml is not valid YAML"]),
        ("- a\n- b\n", ["has no settings"]),
        ("target: {path: T, language: no}\ndata: {path: D}\nout: O", ["= False: ", "in quotes"]),
        (None, ["no settings file"]),
    ],
)
def test_a_wrong_file_is_named_with_the_remedy(tmp_path, text, words):
    file = tmp_path / "settings.yaml" if text is None else yaml_file(tmp_path, text)
    error = message([], file=file)
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("override", "kind", "meant"),
    [
        ("max_new_tokens=5", EvalConfig, "'decode.sampling.max_new_tokens'"),
        ("sampling=5", EvalConfig, "'decode.sampling'"),
        ("decode.k=5", EvalConfig, "'decode.stop.k'"),
        ("decode.stop.temperature=1", EvalConfig, "'decode.sampling.temperature'"),
        ("path=m", EvalConfig, "'data.path'"),
        ("repeat=1", EvalConfig, "'repeats'"),
        ("temprature=1", EvalConfig, "'decode.sampling.temperature'"),
        ("others.one.drafer=x", EvalConfig, "'others.NAME.drafter'"),
        ("learning_rates=1", SpecDrafterRecipe, "'train.learning_rate'"),
        ("target.pth=t5-small", DistillConfig, "'target.path'"),  # which is missing too
    ],
)
def test_an_unknown_name_is_sought_among_all_settings(override, kind, meant):
    """The suggestion is the most similar name of any group, with its group."""
    error = message([override], kind=kind)
    assert error == f"unknown setting {override.partition('=')[0]!r}; did you mean {meant}?"


def test_an_unknown_name_in_a_group_is_shown_as_the_user_wrote_it():
    with pytest.raises(ConfigError, match=r"unknown setting 'distill\.num_beam'; .*'distill\.num_"):
        validate_settings(DistillConfig, {"num_beam": 3}, within="distill")


def test_settings_survive_dump_and_load(tmp_path):
    given = ["run=checkpoints/r", "target.path=t", "data.path=d", "train.clip=null"]
    recipe = load_settings(SpecDrafterRecipe, None, given)
    file = yaml_file(tmp_path, dump_settings(recipe))
    assert load_settings(SpecDrafterRecipe, file) == recipe


@pytest.mark.parametrize("given", ["4", "[4]", '"4"'])
def test_a_list_of_one_may_be_its_value(given):
    wanted = ["decode.drafter=d", "target.path=t", "data.path=x", "report=r.json"]
    settings = load_settings(EvalConfig, None, [*wanted, f"batch_sizes={given}"])
    assert settings.batch_sizes == (1, 4)  # 1 is always included
