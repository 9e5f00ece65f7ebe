"""Reading of table cells: plain texts, and chats for a tokenizer's chat template.

Chats are lists of turns, {"role": ..., "content": ...} or ShareGPT's {"from": ..., "value": ...}.
Other keys of a turn are kept: names, tool calls, reasoning. If the last turn is the assistant's, it
is the reference, and the turns before it are the prompt.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from drafttrain.config.inputs import DataConfig

CHAT = "chat"
"""Column with the arguments of the chat template, as JSON."""
CHAT_SETTINGS = {"tools": list, "chat_template_kwargs": dict}
"""Further columns that are passed to the chat template, and their types."""
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
ROLES |= {"bard": "assistant", "model": "assistant", "function_call": "assistant"}
ROLES |= {"observation": "tool", "function_response": "tool"}
"""Standard role names by ShareGPT's names."""
NO_USER = "no user turn, or one without text"


class Refused(Exception):
    """The reason why a row cannot be used or has no output; raised, or kept in the row's place."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def text_of(value: Any, blank: bool = False) -> str:
    """Returns the text of a cell without byte-order mark. blank: accept empty texts and convert
    numbers to texts. Raises Refused."""
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
    """Returns a reference text, which may be empty; of several, the first. None if not a text."""
    with suppress(Refused):
        return text_of(value[0] if isinstance(value, list) and value else value, blank=True)
    return None


def is_chat(value: Any) -> bool:
    """Whether a cell contains turns: objects with a role."""
    return isinstance(value, list) and any(
        isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value
    )


def read_chat(value: Any, row: Mapping[str, Any], config: DataConfig) -> dict[str, str | None]:
    """Reads a chat with its row's tools and template settings; adds prefix and suffix to the last
    user turn. Returns that turn as `source`, the arguments of the chat template as JSON, and the
    assistant's last turn, if any, as `reference`. Raises Refused."""
    if not is_chat(value):
        raise Refused(NO_USER if value in (None, []) else "no turns of a chat, which others are")
    turns = [_read_turn(turn) for turn in value]
    answer = turns.pop()["content"] or None if turns[-1]["role"] == "assistant" else None
    users = [turn for turn in turns if turn["role"] == "user"]
    if not users or not all(turn["content"].strip() for turn in users):
        raise Refused(NO_USER)
    source = users[-1]["content"] = config.prefix + users[-1]["content"] + config.suffix
    arguments: dict[str, Any] = {"conversation": turns}
    for name, kind in CHAT_SETTINGS.items():
        if own := from_json(row.get(name)):
            if not isinstance(own, kind):
                raise Refused(f"{name} = {own!r:.60} is no {kind.__name__}")
            arguments[name] = own
    if config.chat_template_kwargs:
        own = arguments.get("chat_template_kwargs", {})
        arguments["chat_template_kwargs"] = config.chat_template_kwargs | own
    return {"source": source, CHAT: json.dumps(arguments), "reference": answer}


def _read_turn(turn: Any) -> dict[str, Any]:
    """Converts a turn to standard names and joins its parts with newlines (as vLLM does)."""
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
    found |= {"role": role, "content": content or ""}  # templates need `content` in tool calls too
    calls = from_json(found.get("tool_calls"))
    if isinstance(calls, list):
        found["tool_calls"] = [_with_arguments(call) for call in calls]
    if content is None and not calls:
        raise Refused(NO_USER if role == "user" else f"a turn of {role} without text")
    return found


def _read_part(part: Any) -> str:
    """Returns the text of one part of a turn's content. Raises Refused for other parts."""
    text = part.get("text") if isinstance(part, dict) else part
    if isinstance(text, str):
        return text
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise Refused(f"a turn with a part of type {kind}, where only texts can be read")


def _with_arguments(call: Any) -> Any:
    """Parses a tool call's arguments: templates expect an object, servers write JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return call | {"function": function | {"arguments": from_json(function.get("arguments"))}}


def from_json(value: Any) -> Any:
    """Parses a JSON text; returns any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
