"""What a cell holds: a text, or a chat as a tokenizer's template takes it.

Chats are lists of turns, {"role": ..., "content": ...} or ShareGPT's {"from": ..., "value": ...},
with whatever else a turn has: names, tool calls, reasoning. An assistant's turn at the end is the
reference, what comes before it is the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from drafttrain.config.inputs import DataConfig

CHAT = "chat"
"""Column of the arguments of a chat template, as JSON."""
CHAT_SETTINGS = {"tools": list, "chat_template_kwargs": dict}
"""Columns of a chat's row that its template gets too, and what they hold."""
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
ROLES |= {"bard": "assistant", "model": "assistant", "function_call": "assistant"}
ROLES |= {"observation": "tool", "function_response": "tool"}
"""ShareGPT's names of roles, and the usual ones."""
NO_USER = "no user turn, or one without text"


class Refused(Exception):
    """A row that cannot be used, or has no output: raised while it is read, kept in its place."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Chat:
    """A chat that can be rendered."""

    source: str
    """The user's last turn."""
    template: str
    """Arguments of the chat template, as JSON."""
    answer: str | None
    """The assistant's turn that ends it."""


def text_of(value: Any, blank: bool = False) -> str:
    """The text of a cell, without a byte-order mark. blank: texts may be empty, and numbers are
    texts. Raises Refused."""
    if blank and isinstance(value, int | float):
        value = str(value)
    if value is None:
        raise Refused("empty")
    if not isinstance(value, str):
        raise Refused(f"{type(value).__name__} {value!r:.60}, not a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Refused(f"half of a surrogate pair at character {error.start}") from None
    value = value.removeprefix("\ufeff")
    if not (blank or value.strip()):
        raise Refused("empty")
    return value


def reference_of(value: Any) -> str | None:
    """The text of a reference, which may be empty, or the first of several; None for what is no
    text."""
    with suppress(Refused):
        return text_of(value[0] if isinstance(value, list) and value else value, blank=True)
    return None


def is_chat(value: Any) -> bool:
    """Whether a cell holds turns: objects with a role."""
    return isinstance(value, list) and any(
        isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value
    )


def read_chat(value: Any, row: Mapping[str, Any], config: DataConfig) -> Chat:
    """The prompt of a chat, prefix and suffix around the user's last turn, and the tools and
    template settings of its row. Raises Refused."""
    if not is_chat(value):
        raise Refused(NO_USER if value in (None, []) else "no turns of a chat, which others are")
    turns = [_read_turn(turn) for turn in value]
    answer = None
    if turns[-1]["role"] == "assistant":
        answer = turns.pop()["content"] or None
    users = [turn for turn in turns if turn["role"] == "user"]
    if not users or not all(turn["content"].strip() for turn in users):
        raise Refused(NO_USER)
    source = users[-1]["content"] = config.prefix + users[-1]["content"] + config.suffix
    arguments: dict[str, Any] = {"conversation": turns}
    for name, kind in CHAT_SETTINGS.items():
        own = from_json(row.get(name))
        if own and not isinstance(own, kind):
            raise Refused(f"{name} = {own!r:.60} is no {kind.__name__}")
        if own:
            arguments[name] = own
    if config.chat_template_kwargs:
        own = arguments.get("chat_template_kwargs", {})
        arguments["chat_template_kwargs"] = config.chat_template_kwargs | own
    return Chat(source, json.dumps(arguments), answer)


def _read_turn(turn: Any) -> dict[str, Any]:
    """A turn by the names that templates know, its parts joined by new lines (as vLLM does)."""
    if not isinstance(turn, dict):
        raise Refused(f"a turn is {turn!r:.60}, no object")
    sender = turn.get("from")
    role, content = turn.get("role", ROLES.get(sender, sender)), turn.get("content")
    content = turn.get("value") if content is None else content
    if not isinstance(role, str) or not role:
        raise Refused(f"a turn has the role {role!r}")
    if isinstance(content, list):
        content = "\n".join(map(_read_part, content))
    if content is not None:
        content = text_of(content, blank=True)
    found = {k: v for k, v in turn.items() if k not in ("from", "value") and v is not None}
    found |= {"role": role, "content": content or ""}  # templates read it of tool calls too
    calls = from_json(found.get("tool_calls"))
    if isinstance(calls, list):
        found["tool_calls"] = [_with_arguments(call) for call in calls]
    if content is None and not calls:
        raise Refused(NO_USER if role == "user" else f"a turn of {role} without text")
    return found


def _read_part(part: Any) -> str:
    """A part of a content: its text."""
    text = part.get("text") if isinstance(part, dict) else part
    if isinstance(text, str):
        return text
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise Refused(f"a turn with a part of type {kind}, where only texts can be read")


def _with_arguments(call: Any) -> Any:
    """A tool call whose arguments are an object, as templates expect; servers write JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return call | {"function": function | {"arguments": from_json(function.get("arguments"))}}


def from_json(value: Any) -> Any:
    """What a text of JSON holds; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
