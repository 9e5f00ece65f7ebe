"""Which program a server is, and what it calls its model."""

from __future__ import annotations

from drafttrain.config.base import ConfigError
from drafttrain.data.servers.programs import OPENAI, PROGRAMS, Program
from drafttrain.data.servers.transport import Connection, Failure

MODELS = "/v1/models"


def find_model(connection: Connection, wanted: str | None, path: str) -> tuple[str, Program]:
    """The name that a server has for its model, and which program it is.

    wanted: that name, where the user gave it as server.model; otherwise the only one there is, or
    the target's path. Raises ConfigError.
    """
    url, given = connection.address.url, wanted
    try:
        models = connection.ask(MODELS)["data"]
        owners = {model["id"]: model.get("owned_by") for model in models}
        if not all(isinstance(name, str) for name in owners):
            raise TypeError
    except Failure as failure:
        raise ConfigError(f"{failure}; start it, or correct server.urls") from None
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"server {url}: {MODELS} gives no list of models; give the address of an "
            "OpenAI-compatible server (vLLM, SGLang, llama-server, transformers serve)"
        ) from None
    if wanted is None:
        fits = [name for name in owners if name == path or len(owners) == 1]
        wanted = fits[0] if fits else None
    if wanted is None or wanted not in owners:
        shown = ", ".join(map(repr, [*owners][:5])) or "none"
        asked = "none of them is given" if given is None else f"not {wanted!r}"
        raise ConfigError(
            f"server {url} has the models {shown}, {asked}; say which with server.model=NAME"
        )
    return wanted, PROGRAMS.get(owners[wanted], OPENAI)
