"""Options of a command, made from the settings that they stand for.

A command's table says which setting each option is short for; the settings class says what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import update_wrapper
from inspect import Parameter, Signature, getdoc, signature
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from drafttrain.config.base import Config
from drafttrain.config.fields import choices, find_field, plain_types, sentences, settings_below
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

Flags = Mapping[str, "str | Flag"]
"""Option, as `--k` -> the dotted name of its setting, as `decode.stop.k`."""
WORDS = {str: "text", int: "int", float: "float", Path: "path"}
"""What the help shows for a value of a type."""
DEFAULT = "Default: "
"""How the sentence of a description begins that says what counts where nothing is given."""


@dataclass(frozen=True)
class Flag:
    """An option that needs more than its setting's class says."""

    setting: str
    shape: str | None = None
    """What the help shows for a value."""
    help: str | None = None
    read: Callable[[list[str]], Any] | None = None
    """Makes a value of the texts of an option that may be repeated."""


def takes_settings(
    kind: type[Config],
    flags: Flags,
    fill: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    file: str | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a Typer command of a function of settings: it reads them, then calls the function.

    Its options are --config, KEY=VALUE, the flags, --debug, and the function's own parameters but
    the first, annotated as Typer has them. fill: see `load_settings`. file: YAML that is read where
    --config is not given.
    """
    rows = {option: Flag(row) if isinstance(row, str) else row for option, row in flags.items()}

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        own = list(signature(command, eval_str=True).parameters.values())[1:]
        parameters = [
            _parameter("overrides", Overrides),
            _parameter("config", ConfigFile, None if file is None else Path(file)),
            *(_option(kind, option, flag) for option, flag in rows.items()),
            *(_parameter(one.name, one.annotation, one.default) for one in own),
            _parameter("debug", Debug, False),
        ]

        def run(**given: Any) -> None:
            values = {flag.setting: _value(flag, given[_name(one)]) for one, flag in rows.items()}
            overrides = given["overrides"] or ()
            settings = load_settings(kind, given["config"], overrides, values, fill)
            command(settings, **{one.name: given[one.name] for one in own})

        update_wrapper(run, command)
        run.__doc__ = _reflowed(command)
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        run.__signature__ = Signature(parameters)  # what Typer reads
        return run

    return wrap


def _reflowed(command: Callable[..., None]) -> str:
    """Its docstring, a line a paragraph but for those that \\b marks, so that it fits any width."""
    paragraphs = (getdoc(command) or "").split("\n\n")
    marked = (one if one.startswith("\b") else " ".join(one.split()) for one in paragraphs)
    return "\n\n".join(marked)


def _parameter(name: str, annotation: Any, default: Any = None) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _name(option: str) -> str:
    """`--max-new-tokens` as a parameter of a function; `--for` as `for_`, since Python has it."""
    name = option.removeprefix("--").replace("-", "_")
    return f"{name}_" if iskeyword(name) else name


def _option(kind: type[Config], option: str, flag: Flag) -> Parameter:
    """The option as Typer has it. Values are text: their types are those of the settings."""
    annotation = find_field(kind, flag.setting).annotation
    switch = annotation is bool
    declared = typer.Option(
        option,
        metavar=None if switch else f"<{flag.shape or shape_of(annotation)}>",
        help=flag.help or option_help(kind, flag.setting),
        rich_help_panel=_panel(kind, flag.setting),
    )
    if switch:
        return _parameter(_name(option), Annotated[bool, declared], False)
    text = str if flag.read is None else list[str]
    return _parameter(_name(option), Annotated[text | None, declared])


def _value(flag: Flag, given: Any) -> Any:
    """What an option sets; None where it is not given."""
    if not given and not isinstance(given, str):
        return None
    return given if flag.read is None else flag.read(given)


def shape_of(annotation: Any) -> str:
    """A value as the help shows it: int, or int,int for a list."""
    [kind, *_] = plain_types(annotation)
    if get_origin(kind) is tuple:
        inside = shape_of(get_args(kind)[0])
        return f"{inside},{inside}"
    return "name" if get_origin(kind) is Literal else WORDS[kind]


def option_help(kind: type[Config], setting: str) -> str:
    """What a setting's description says in its first sentence, its choices, and its default.

    An option for the path in a group (data.path) stands for the group: what the command's own
    settings say of that comes first.
    """
    field = find_field(kind, setting)
    told = sentences(field.description)
    group, _, name = setting.rpartition(".")
    of_group = sentences(find_field(kind, group).description) if group and name == "path" else []
    if of_group:
        told = told[:1] + of_group if of_group[0].startswith(DEFAULT) else of_group
    shown = [one for one in told[:1] if not one.startswith(DEFAULT)]
    known = choices(field.annotation)
    if not all(choice in " ".join(shown) for choice in known):
        shown.append(f"One of {', '.join(known)}.")
    return " ".join([*shown, *(one for one in told if one.startswith(DEFAULT))])


def _panel(kind: type[Config], setting: str) -> str | None:
    """Options of one group of `decode` are listed together, under what the group is."""
    *groups, _ = setting.split(".")
    if len(groups) < 2:
        return None
    return sentences(settings_below(kind, groups).__doc__)[0].removesuffix(".")
