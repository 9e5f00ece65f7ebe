"""Options of a command, made from the settings that they stand for.

A command's table says which setting each option is short for; the settings class says what it is.
"""

from __future__ import annotations

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
    typer.Argument(metavar="KEY=VALUE", help="Any other setting, as data.split=test."),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of settings.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be done; load no weights, write nothing.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
"""Read by run_command before the command itself runs; declared to be listed in the help."""


def takes_settings(
    kind: type[Config],
    flags: Mapping[str, str],
    fill: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    file: str | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a Typer command of a function of settings: it reads them, then calls the function.

    Its options are --config, KEY=VALUE, the flags, --debug, and the function's own parameters but
    the first, annotated as Typer has them. flags: option, as `--k` -> setting, as `decode.stop.k`.
    fill: see `load_settings`. file: YAML that is read where --config is not given.
    """

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        own = list(signature(command, eval_str=True).parameters.values())[1:]
        parameters = [
            _parameter("overrides", Overrides),
            _parameter("config", ConfigFile, None if file is None else Path(file)),
            *(_option(kind, option, setting) for option, setting in flags.items()),
            *(one.replace(kind=Parameter.KEYWORD_ONLY) for one in own),
            _parameter("debug", Debug, False),
        ]

        def run(**given: Any) -> None:
            values = {setting: _value(setting, given[_name(setting)]) for setting in flags.values()}
            overrides = given["overrides"] or ()
            settings = load_settings(kind, given["config"], overrides, values, fill)
            command(settings, **{one.name: given[one.name] for one in own})

        update_wrapper(run, command)
        run.__doc__ = getdoc(command)
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        run.__signature__ = Signature(parameters)  # what Typer reads
        return run

    return wrap


def _parameter(name: str, annotation: Any, default: Any = None) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _name(setting: str) -> str:
    """The parameter of a setting's option: `decode.stop.k` as `decode__stop__k`."""
    return setting.replace(".", "__")


def _option(kind: type[Config], option: str, setting: str) -> Parameter:
    """The option as Typer has it. Values are text: their types are those of the settings."""
    annotation = fields_of(kind)[setting].annotation
    if annotation is bool:
        switch = typer.Option(option, help=option_help(kind, setting))
        return _parameter(_name(setting), Annotated[bool, switch], False)
    declared = typer.Option(option, metavar="VALUE", help=option_help(kind, setting))
    text = list[str] if get_origin(annotation) is dict else str
    return _parameter(_name(setting), Annotated[text | None, declared])


def _value(setting: str, given: Any) -> Any:
    """What an option sets; None where it is not given. `name=value` lines make a mapping."""
    if isinstance(given, list):
        if wrong := [text for text in given if "=" not in text]:
            raise ConfigError(f"{setting} {wrong[0]!r} is not NAME=VALUE; write for example k=5,10")
        given = dict(text.split("=", 1) for text in given)
    return given if given or isinstance(given, str) else None


def option_help(kind: type[Config], setting: str) -> str:
    """What a setting is, its name at the end; before the path in a group what the group is for."""
    group = setting.removesuffix(".path")
    texts = [fields_of(kind)[name].description or "" for name in dict.fromkeys((group, setting))]
    return " ".join([*" ".join(texts).split(), f"({setting})"])
