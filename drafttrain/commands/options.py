"""Command-line options, generated from settings classes.

A command maps each option to a setting; the option's type and help come from the settings class.
"""

from collections.abc import Callable, Mapping
from functools import update_wrapper
from inspect import Parameter, Signature, getdoc, signature
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

from drafttrain.config.base import Config, ConfigError, fields_of
from drafttrain.config.reading import load_settings

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Any other setting, such as data.split=test."),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of settings.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan; load no weights, write nothing.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
"""Read by run_command before the command runs; declared here only for the help."""


def takes_settings(
    kind: type[Config],
    flags: Mapping[str, str],
    fill: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    file: str | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turns a function of settings into a Typer command that reads them and calls the function.

    The command's options are --config (default: `file`), KEY=VALUE, the flags, --debug and the
    function's parameters after the first, which carry Typer annotations. flags maps options to
    settings, such as `--k` to `decode.stop.k`. fill: see `load_settings`.
    """

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        extra = list(signature(command, eval_str=True).parameters.values())[1:]
        parameters = [
            _parameter("overrides", Overrides),
            _parameter("config", ConfigFile, None if file is None else Path(file)),
            *(_option(kind, option, setting) for option, setting in flags.items()),
            *(parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in extra),
            _parameter("debug", Debug, False),
        ]

        def run(**given: Any) -> None:
            values = {setting: _value(setting, given[_name(setting)]) for setting in flags.values()}
            overrides = given["overrides"] or ()
            settings = load_settings(kind, given["config"], overrides, values, fill)
            command(settings, **{parameter.name: given[parameter.name] for parameter in extra})

        update_wrapper(run, command)
        run.__doc__ = getdoc(command)
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__signature__ = Signature(parameters)  # Typer reads this
        return run

    return wrap


def _parameter(name: str, annotation: Any, default: Any = None) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _name(setting: str) -> str:
    """Returns the parameter name for a setting: `decode__stop__k` for `decode.stop.k`."""
    return setting.replace(".", "__")


def _option(kind: type[Config], option: str, setting: str) -> Parameter:
    """Returns an option as a Typer parameter; its value stays text for the settings to parse."""
    annotation, text = fields_of(kind)[setting].annotation, option_help(kind, setting)
    if annotation is bool:
        return _parameter(_name(setting), Annotated[bool, typer.Option(option, help=text)], False)
    declared = typer.Option(option, metavar="VALUE", help=text)
    value = list[str] if get_origin(annotation) is dict else str
    return _parameter(_name(setting), Annotated[value | None, declared])


def _value(setting: str, given: Any) -> Any:
    """Returns the value of an option, None if not given; `name=value` texts become a mapping."""
    if isinstance(given, list):
        if wrong := [text for text in given if "=" not in text]:
            raise ConfigError(f"{setting} {wrong[0]!r} is not NAME=VALUE; write it as k=5,10")
        names = [text.partition("=")[0] for text in given]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"{setting}.{twice[0]} is given twice; write it once, as k=5,10")
        given = dict(text.split("=", 1) for text in given)
    return given if given or isinstance(given, str) else None


def option_help(kind: type[Config], setting: str) -> str:
    """Returns the help text of a setting, with its name; that of a path starts with its group's."""
    group = setting.removesuffix(".path")
    texts = [fields_of(kind)[name].description or "" for name in dict.fromkeys((group, setting))]
    return " ".join([*" ".join(texts).split(), f"({setting})"])
