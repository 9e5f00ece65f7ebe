"""The backend `server`: outputs of a decoder-only target that runs on an OpenAI-compatible server.

Uses the `openai` client, with retries and backoff, and `/v1/completions`. Only the tokenizer and
the settings of the target's folder are read. Prompts are sent as token ids, so the server reads
exactly the drafter's prompt. An answer contains text, or `token_ids` if the server supports them
(vLLM with `server.extra_body.return_token_ids=true`). Text is tokenised again; if the number of
tokens differs from the server's, the tokens may not be the target's, and the row is an error.
"""

import asyncio
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import openai
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import DistillConfig
from drafttrain.data.distill.batches import BatchDecoder, Decoded, batches_of_rows, sampling_of
from drafttrain.data.inputs.chats import Refused
from drafttrain.data.shards.outputs import ShardRow
from drafttrain.decoding.padding import end_tokens
from drafttrain.models.loading import LoadedTarget, check_target

KEY = "OPENAI_API_KEY"
"""Environment variable that the API key is read from."""
TIMEOUT, RETRIES, PROBE_SECONDS = 600.0, 6, 10.0
"""Timeout in seconds and retries of requests for outputs; timeout of those for the models."""
ROUNDS, FEW = 16, 4
"""Rows of a batch per concurrent request; minimal number of rows whose failure ends the run."""
ENDS = dict.fromkeys((401, 403), f"set {KEY} in the environment, or correct it")
ENDS |= dict.fromkeys((404, 405), "give the address that ends in /v1, and check server.model")
ENDS |= dict.fromkeys((429, 503), "check the server")
"""HTTP statuses that end the run, with the remedy."""
SHOWN = 200
"""Maximal number of characters of a server's error in a message."""
UNSENT = (
    "no_repeat_ngram_size bad_words_ids sequence_bias suppress_tokens begin_suppress_tokens "
    "forced_bos_token_id forced_eos_token_id min_length min_new_tokens "
    "exponential_decay_length_penalty"
).split()
"""Settings of a generation_config that cannot be sent to a server."""


class ServerGone(OSError):
    """The server no longer answers; finished shards are kept."""


def check_server(config: DistillConfig) -> None:
    """Raises ConfigError for invalid settings, before any request."""
    if config.server.url is None:
        raise ConfigError(
            "backend = 'server', but server.url is not set; give --server http://localhost:8000/v1"
        )
    read_address(config.server.url)
    if check_target(config.target).is_encoder_decoder:
        raise ConfigError(
            f"servers support only decoder-only targets, but target.path = {config.target.path!r} "
            "is an encoder-decoder model; leave --server out"
        )


def read_address(text: str) -> str:
    """Returns the address, ending in /v1. Raises ConfigError, without quoting it (passwords)."""
    try:
        parts = urlsplit(text if "//" in text else f"http://{text}")
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        valid = False
    if not valid or parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            "server.url must be an address with host, port and path only, such as "
            f"http://localhost:8000/v1; give the key in {KEY}"
        )
    return parts.geturl().rstrip("/").removesuffix("/v1") + "/v1"


def open_server(config: DistillConfig, target: LoadedTarget) -> BatchDecoder:
    """Opens the backend `server`. Raises ConfigError if the server or its model cannot be used."""
    check_server(config)
    url = read_address(config.server.url)
    model = find_model(url, config.server.model, target.path)
    check_sent(target, config)
    batches = partial(batches_of_rows, count=ROUNDS * config.server.concurrency)
    return BatchDecoder("server", Server(config, target, url, model).decode, batches, model)


def connection(url: str, timeout: float, retries: int) -> dict[str, Any]:
    """Returns the arguments of a client; the default key is "none". Raises ConfigError."""
    key = os.environ.get(KEY, "").strip() or "none"
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{KEY} contains non-printable or non-ASCII characters; set it again")
    return {"base_url": url, "api_key": key, "timeout": timeout, "max_retries": retries}


def find_model(url: str, wanted: str | None, path: str) -> str:
    """Returns the server's name for the target: server.model, else the target's path or the only
    model. Raises ConfigError."""
    given = connection(url, PROBE_SECONDS, 1)
    try:
        with OpenAI(**given) as client:
            names = [model.id for model in client.models.list().data]
    except (openai.OpenAIError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{words(url, error)}: it does not list its models; start it, or correct server.url"
        ) from None
    model = wanted or next((name for name in names if name == path or len(names) == 1), None)
    if model not in names:
        known = ", ".join(map(repr, names[:5])) or "none"
        reason = "and server.model is not set" if wanted is None else f"not {wanted!r}"
        raise ConfigError(
            f"server {url} has the models {known}, {reason}; choose one with server.model=NAME"
        )
    return model


def check_sent(target: LoadedTarget, config: DistillConfig) -> None:
    """Raises ConfigError for settings of the target that cannot be sent to the server."""
    values = target.model.generation_config.to_dict()
    if unsent := {name: values[name] for name in UNSENT if values.get(name)}:
        raise ConfigError(
            f"the target's generation_config sets {unsent}, which cannot be sent to a server; "
            "remove it from generation_config.json, or leave --server out"
        )
    sampling = sampling_of(config)
    penalty = values.get("repetition_penalty") or 1.0
    for name, value, neutral in (
        ("top_k", sampling.top_k, 0),
        ("min_p", sampling.min_p, 0.0),
        ("repetition_penalty", penalty, 1.0),
    ):
        if value != neutral and config.server.extra_body.get(name) != value:
            raise ConfigError(
                f"{name} = {value:g} is not in OpenAI's interface; give it under your "
                f"server's name, such as server.extra_body.{name}={value:g}, or use "
                f"{name} = {neutral:g}"
            )


def words(url: str, error: Exception) -> str:
    """Formats an error on one line and masks the API key, which some servers repeat."""
    cause = "" if isinstance(error, openai.APIStatusError) else error.__cause__ or ""
    message = " ".join(f"{error} {cause}".split())
    if key := os.environ.get(KEY, "").strip():
        message = message.replace(key, "***")
    return f"server {url}: {message[:SHOWN]}"


@dataclass(frozen=True)
class Server:
    """A server that decodes rows, with `server.concurrency` requests at once."""

    config: DistillConfig
    target: LoadedTarget
    url: str
    model: str

    def decode(self, rows: Sequence[ShardRow]) -> Iterable[tuple[int, Decoded]]:
        """Returns the output of each row. Raises ServerGone if the server no longer answers, or if
        all of FEW or more rows fail: the shard is not written, and the same command continues the
        run."""
        outputs = asyncio.run(self._decode(rows))
        failed = [one.reason for one in outputs if isinstance(one, Refused)]
        if len(failed) == len(rows) >= FEW:
            raise ServerGone(f"all of {len(rows)} rows failed, the first one: {failed[0]}")
        return enumerate(outputs)

    async def _decode(self, rows: Sequence[ShardRow]) -> list[Decoded]:
        free = asyncio.Semaphore(self.config.server.concurrency)

        async def answer(row: ShardRow) -> Decoded:
            async with free:
                return await self._answer(client, row)

        async with AsyncOpenAI(**connection(self.url, TIMEOUT, RETRIES)) as client:
            return await asyncio.gather(*map(answer, rows))

    async def _answer(self, client: AsyncOpenAI, row: ShardRow) -> Decoded:
        """Returns a row's output, or the reason why it has none. Raises ServerGone."""
        try:
            answer = await client.completions.create(**self._request(row))
            return self._tokens(row, answer)
        except openai.APIStatusError as error:
            if error.status_code in ENDS:
                raise self._gone(error, ENDS[error.status_code]) from None
            return Refused(words(self.url, error))
        except openai.APIConnectionError as error:
            try:
                await client.with_options(max_retries=0, timeout=PROBE_SECONDS).models.list()
            except openai.OpenAIError:
                raise self._gone(error, "check the server") from None
            return Refused(words(self.url, error))
        except (openai.OpenAIError, AttributeError, TypeError, ValueError) as error:
            return Refused(f"{words(self.url, error)}: not an answer of /v1/completions")

    def _gone(self, error: Exception, remedy: str) -> ServerGone:
        return ServerGone(
            f"{words(self.url, error)}; finished rows are kept: {remedy} and run the same command "
            "again, it continues"
        )

    def _request(self, row: ShardRow) -> dict[str, Any]:
        sampling, drawn = self.config.sampling, {"temperature": 0.0, "top_p": 1.0}
        if self.config.method == "sample":
            key = np.random.SeedSequence([sampling.seed, row.row]).generate_state(1)[0]
            drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p}
            drawn["seed"] = int(key) & (2**31 - 1)
        return drawn | {
            "model": self.model,
            "prompt": list(row.source_ids),
            "max_tokens": sampling.max_new_tokens,
            "extra_body": self.config.server.extra_body,
        }

    def _tokens(self, row: ShardRow, answer: Completion) -> Decoded:
        """Returns an answer's tokens, or Refused if they may not be the target's."""
        [choice], usage = answer.choices, answer.usage
        tokenizer, ended = self.target.tokenizer, choice.finish_reason == "stop"
        tokens, most = getattr(choice, "token_ids", None), self.config.sampling.max_new_tokens
        vocabulary = self.target.model.config.get_text_config(decoder=True).vocab_size
        read, made = (usage.prompt_tokens, usage.completion_tokens) if usage else (None, None)
        if read not in (None, len(row.source_ids)):
            return Refused(
                f"the server read {read} prompt tokens, but the target's tokenizer makes "
                f"{len(row.source_ids)}: the server has another tokenizer, or adds tokens"
            )
        if tokens is None:
            tokens = tokenizer(choice.text, add_special_tokens=False)["input_ids"]
            if ended:  # the tokenizer's EOS, if it is one of the target's
                ends = end_tokens(self.target.model.generation_config)
                own = tokenizer.eos_token_id
                tokens = [*tokens, own if own in ends else ends[0]]
            if made not in (None, len(tokens)):
                return Refused(f"the text has {len(tokens)} tokens, but the server made {made}")
        if not tokens:
            return Refused("the answer has no tokens")
        if not 0 <= min(tokens) <= max(tokens) < vocabulary:
            return Refused(f"token {max(tokens)} is not among the target's {vocabulary}")
        if len(tokens) > most:
            return Refused(f"{len(tokens)} tokens, more than max_tokens = {most}")
        if not ended and len(tokens) < most:
            return Refused(f"{choice.finish_reason}: cut after {len(tokens)} tokens")
        # white space and punctuation at the edges may differ between decoders
        texts = tokenizer.decode(tokens, skip_special_tokens=True), choice.text
        if ended and len({"".join(filter(str.isalnum, text)) for text in texts}) > 1:
            return Refused("the target's tokenizer decodes the server's tokens to another text")
        return tokens
