"""Settings of serving programs: distilling from them."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from drafttrain.config.base import Config, split_at_commas


class ServerConfig(Config):
    """Servers that run the target of a distillation, by OpenAI's interface."""

    urls: tuple[str, ...] = ()
    """Their addresses, as http://localhost:8000/v1, several with commas between them; rows are
    shared out among them. A key is read from the environment (OPENAI_API_KEY) and written
    nowhere."""
    model: str | None = None
    """The name that they have for the target. Default: the only one, or the target's path."""
    concurrency: PositiveInt = 32
    """Rows that each server is asked for at once."""
    timeout: PositiveFloat = 600.0
    """Seconds that an answer may take."""
    retries: NonNegativeInt = 6
    """How often a row is asked for again, with growing pauses, where a server fails."""
    prompts: Literal["tokens", "text"] = "tokens"
    """How prompts are sent. text: for servers that take no token ids (transformers serve)."""
    extra_body: dict[str, bool | int | float | str] = {}
    """More fields of each request, which OpenAI's interface lacks. For vLLM: {return_token_ids:
    true, top_k: -1, min_p: 0.0, repetition_penalty: 1.0}."""

    _split = field_validator("urls", mode="before")(split_at_commas)
