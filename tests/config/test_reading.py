"""Settings: precedence, types of overrides, and errors that name the field and the remedy."""

from pathlib import Path

import pytest

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import DistillConfig, EvalConfig, ServerConfig
from drafttrain.config.inputs import DataConfig, TargetConfig
from drafttrain.config.reading import dump_settings, load_settings, merge_values, validate_settings
from drafttrain.config.recipes import SpecDrafterRecipe, TrainConfig

NEEDED = ["target.path=t5-small", "data.path=in.txt", "out=shards"]


def yaml_file(folder: Path, text: str) -> Path:
    file = folder / "settings.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def message(*overrides: str, kind=DistillConfig, file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(kind, file, overrides)
    return str(caught.value)


def test_overrides_and_flags_win_over_the_file(tmp_path):
    file = yaml_file(tmp_path, "target: {path: file, dtype: bfloat16}\ndata: {path: a}\nout: o")
    settings = load_settings(
        DistillConfig, file, ["data.path=b"], {"target.path": "from-flag", "data.limit": None}
    )
    assert settings.target.path == "from-flag"
    assert settings.target.dtype == "bfloat16"
    assert settings.data.path == "b"
    assert settings.data.limit is None


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
        ("{category: qa}", {"category": "qa"}),
        ("[0.5,0.6]", [0.5, 0.6]),
        ("", None),
    ],
)
def test_a_value_is_read_as_yaml_and_never_resolved(text, value):
    assert merge_values(overrides=[f"data.prefix={text}"]) == {"data": {"prefix": value}}


def test_references_in_a_file_stay_text_and_are_never_resolved(tmp_path):
    file = yaml_file(tmp_path, "path: a\ntemplate: '${path} ${oc.env:HOME}'\n")
    assert load_settings(DataConfig, file).template == "${path} ${oc.env:HOME}"


def test_a_mapping_replaces_the_one_before_it(tmp_path):
    file = yaml_file(tmp_path, "extra_body: {top_k: 4}\n")
    settings = load_settings(ServerConfig, file, ["extra_body={min_p: 0.5}"])
    assert settings.extra_body == {"min_p": 0.5}


def test_a_key_that_stands_twice_in_a_file_is_refused(tmp_path):
    error = message(file=yaml_file(tmp_path, "out: a\nout: b\n"))
    assert "line 2" in error and "duplicate key out" in error


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
    error = message(override, kind=kind)
    assert error == f"unknown setting {override.partition('=')[0]!r}; did you mean {meant}?"


def test_an_unknown_name_in_a_group_is_shown_as_the_user_wrote_it():
    with pytest.raises(ConfigError, match=r"unknown setting 'distill\.num_beam'; .*'distill\.num_"):
        validate_settings(DistillConfig, {"num_beam": 3}, within="distill")


def test_an_unknown_setting_without_a_near_name_lists_all():
    text = message(*NEEDED, "target.zzz=1")
    assert text.startswith("unknown setting 'target.zzz'; known here: ")
    assert "path" in text and "revision" in text


def test_a_missing_group_is_named_by_its_first_required_setting():
    assert message("data.path=d", "out=o") == (
        "setting 'target.path' is missing; give target.path=VALUE or put it in the YAML file"
    )


def test_a_wrong_value_names_field_value_and_choices():
    text = message(*NEEDED, "method=beem")
    assert "method = 'beem'" in text and "'greedy', 'beam' or 'sample'" in text
    assert "sampling.temperature = -1" in message(*NEEDED, "sampling.temperature=-1")
    assert "data.limit = 0" in message(*NEEDED, "data.limit=0")


@pytest.mark.parametrize("text", ["seed", "=3", ""])
def test_an_override_without_key_or_equals_sign_is_refused(text):
    assert "is not key=value" in message(text)


def test_a_value_cannot_be_used_as_a_group():
    error = message(*NEEDED, "target.path.revision=main")
    assert "target.path = {'revision': 'main'}" in error and "valid string" in error
    assert (
        "target = 't5-small': this is a group of settings; give one of them, as target.path="
        in (message(*NEEDED[1:], "target=t5-small"))
    )


def test_an_empty_group_in_the_file_can_be_filled_by_overrides(tmp_path):
    file = yaml_file(tmp_path, "target:\ndata:\n")
    assert load_settings(DistillConfig, file, NEEDED).target.path == "t5-small"


def test_invalid_yaml_is_refused(tmp_path):
    file = yaml_file(tmp_path, "a: b: c")
    assert f"{file} is not valid YAML" in message(file=file)
    assert "the value is not valid YAML" in message("out=[1")


def test_a_file_without_settings_is_refused_and_an_empty_one_is_accepted(tmp_path):
    assert "has no settings" in message(file=yaml_file(tmp_path, "- a\n- b\n"))
    assert "no settings file" in message(file=tmp_path / "absent.yaml")
    assert load_settings(TrainConfig, yaml_file(tmp_path, "")) == TrainConfig()


def test_settings_survive_dump_and_load(tmp_path):
    recipe = load_settings(
        SpecDrafterRecipe,
        overrides=["run=checkpoints/r", "target.path=t", "data.path=d", "train.clip=null"],
    )
    file = yaml_file(tmp_path, dump_settings(recipe))
    assert load_settings(SpecDrafterRecipe, file) == recipe


@pytest.mark.parametrize("given", ["4", "[4]", '"4"'])
def test_a_list_of_one_may_be_its_value(given):
    wanted = ["decode.drafter=d", "target.path=t", "data.path=x", "report=r.json"]
    settings = load_settings(EvalConfig, None, [*wanted, f"batch_sizes={given}"])
    assert settings.batch_sizes == (1, 4)  # 1 is always included
