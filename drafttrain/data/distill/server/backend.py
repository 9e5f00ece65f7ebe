"""The backend `server`: outputs of a target that some OpenAI-compatible server runs.

The target's folder is asked for its tokenizer and settings alone. Prompts go out as token ids, so
that the server reads what the drafter will; where it counts other tokens, the row is an error.
Answers come back as token ids (vLLM, llama-server) or as text, which is tokenised again: where that
gives another number of tokens than the server made, the drafter would learn tokens that the target
never wrote, and the row is an error too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drafttrain.config.backends import SERVER
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import DistillConfig
from drafttrain.data.distill.batches import BatchDecoder, Decoded, Refused, longest_first
from drafttrain.data.distill.server.workers import Worked, Workers
from drafttrain.data.inputs.tokens import tokenize_texts
from drafttrain.data.servers.probe import find_model
from drafttrain.data.servers.programs import Answer, Program, Question
from drafttrain.data.servers.transport import (
    PROBE_SECONDS,
    Address,
    Connection,
    Unanswered,
    read_address,
    read_key,
)
from drafttrain.data.shards.outputs import RETOKENISED, Serving, ShardRow
from drafttrain.models.loading import LoadedTarget, check_target

ROUNDS = 16
"""Questions for each place at the servers that a batch holds."""
UNSENT = (
    "no_repeat_ngram_size",
    "bad_words_ids",
    "sequence_bias",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "min_length",
    "min_new_tokens",
    "exponential_decay_length_penalty",
)
"""What a generation_config may ask for and no server is told."""


def check_server(config: DistillConfig) -> None:
    """Refuse what can be known to be wrong before a server is asked. Raises ConfigError."""
    if not config.server.urls:
        raise ConfigError(
            "backend = 'server', but there is no address; give --server http://localhost:8000/v1"
        )
    for url in config.server.urls:
        read_address(url)
    read_key()
    model_config = check_target(config.target)
    if model_config.is_encoder_decoder:
        raise ConfigError(
            f"servers answer for decoder-only targets, but target.path = {config.target.path!r} is "
            "an encoder-decoder model; leave --server out"
        )
    if config.encoded is not None:
        raise ConfigError("encoded is of clips, which are not sent to servers; leave it out")


def open_server(config: DistillConfig, target: LoadedTarget) -> BatchDecoder:
    """Ask each server which model it has. Raises ConfigError for one that is of no use."""
    check_server(config)
    given, key = config.server, read_key()
    found = []
    for address in map(read_address, given.urls):
        connection = Connection(address, PROBE_SECONDS, key)
        found.append(find_model(connection, given.model, target.path))
        connection.close()
    names = sorted({model for model, _ in found})
    if len(names) > 1:
        raise ConfigError(
            f"server.urls: the servers call their models {', '.join(map(repr, names))}; give them "
            "one name (--served-model-name, --alias), so that it is certain that it is one model"
        )
    check_sent(target, [program for _, program in found], config)

    def served(address: Address, program: Program) -> Worked:
        asking = Asking(config, target, names[0], program)
        return Worked(lambda: Connection(address, given.timeout, key), asking)

    addresses = [read_address(url) for url in given.urls]
    programs = [program for _, program in found]
    workers = Workers(
        [served(*one) for one in zip(addresses, programs, strict=True)],
        given.concurrency,
        given.retries,
        given.backoff,
    )
    size = ROUNDS * given.concurrency * len(addresses)

    def batches(rows: Sequence[ShardRow]) -> list[list[ShardRow]]:
        ordered = longest_first(rows)
        return [ordered[start : start + size] for start in range(0, len(ordered), size)]

    serving = Serving(
        urls=[address.url for address in addresses],
        programs=[program.name for program in programs],
        model=names[0],
        prompts=given.prompts,
    )
    return BatchDecoder(SERVER.name, workers, batches, {"server": serving})


def check_sent(target: LoadedTarget, programs: Sequence[Program], config: DistillConfig) -> None:
    """Refuse what servers would have to be told and cannot be. Raises ConfigError."""
    values = target.model.generation_config.to_dict()
    for name in UNSENT:
        if values.get(name):
            raise ConfigError(
                f"the target's generation_config sets {name}={values[name]!r}, which servers are "
                f"not told; take it out of generation_config.json, or distil without --server"
            )
    plain = [program.name for program in programs if not program.warps]
    sampled = config.method == "sample"
    wanted = {"repetition_penalty": values.get("repetition_penalty") or 1.0}
    wanted["sampling.top_k"] = config.sampling.top_k if sampled else 0
    for name, neutral in {"repetition_penalty": 1.0, "sampling.top_k": 0}.items():
        if plain and wanted[name] != neutral:
            raise ConfigError(
                f"{name} = {wanted[name]:g} is not in OpenAI's interface, and a server of "
                "server.urls is none of vLLM, SGLang and llama-server; use one of these, or "
                f"{name} = {neutral:g}"
            )


@dataclass(frozen=True)
class Asking:
    """A row put to a server of one kind, and its answer checked."""

    config: DistillConfig
    target: LoadedTarget
    model: str
    program: Program

    def __call__(self, connection: Connection, row: ShardRow) -> Decoded:
        """The row's output, or why it has none. Raises Failure."""
        prompt: Sequence[int] | str = row.source_ids
        if self.config.server.prompts == "text":
            prompt = self.as_text(row.source_ids)
            if tokenize_texts(self.target.tokenizer, [prompt], True)[0] != list(row.source_ids):
                return Refused("the prompt's text gives other tokens; send tokens, if it can be")
        said = connection.ask(self.program.path, self.program.write(self.question(row, prompt)))
        try:
            answer = self.program.read(said)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise Unanswered(
                f"server {connection.address.url}: an answer of another shape than "
                f"{self.program.path} has ({type(error).__name__}: {error})"
            ) from None
        return self.check(row, answer)

    def as_text(self, source_ids: Sequence[int]) -> str:
        """The prompt without the tokens that tokenizers put before a text, which servers add."""
        tokenizer = self.target.tokenizer
        ids = list(source_ids)
        before = tokenize_texts(tokenizer, ["."], True)[0]
        after = tokenizer(".", add_special_tokens=False)["input_ids"]
        added = before[: len(before) - len(after)]
        if added and ids[: len(added)] == added:
            ids = ids[len(added) :]
        return tokenizer.decode(ids, skip_special_tokens=False)

    def question(self, row: ShardRow, prompt: Sequence[int] | str) -> Question:
        sampling, sampled = self.config.sampling, self.config.method == "sample"
        penalty = self.target.model.generation_config.repetition_penalty
        key = np.random.SeedSequence([sampling.seed, row.row]).generate_state(1)[0]
        return Question(
            self.model,
            prompt,
            sampling.max_new_tokens,
            sampling.temperature if sampled else 0.0,
            sampling.top_k if sampled else 0,
            sampling.top_p if sampled else 1.0,
            penalty or 1.0,
            int(key) & (2**31 - 1) if sampled else None,
        )

    def check(self, row: ShardRow, answer: Answer) -> Decoded:
        """The tokens of an answer, once they are known to be the target's."""
        if answer.read_tokens is not None and answer.read_tokens != len(row.source_ids):
            return Refused(
                f"the server read {answer.read_tokens} prompt tokens, the target's tokenizer makes "
                f"{len(row.source_ids)}: its tokenizer is another, or it adds tokens"
            )
        tokens = self.retokenise(answer) if answer.tokens is None else list(answer.tokens)
        if answer.tokens is None and answer.made_tokens not in (None, len(tokens)):
            return Refused(
                f"{RETOKENISED}: {len(tokens)} tokens where the server made {answer.made_tokens}"
            )
        return self.problem(answer, tokens) or tokens

    def retokenise(self, answer: Answer) -> list[int]:
        """The tokens of a text, and of its end."""
        tokens = self.target.tokenizer(answer.text, add_special_tokens=False)["input_ids"]
        return [*tokens, self.end] if answer.ended else tokens

    @property
    def ends(self) -> list[int]:
        own: Any = self.target.model.generation_config.eos_token_id
        return own if isinstance(own, list) else [own]

    @property
    def end(self) -> int:
        """The token that ends outputs; of several, the tokenizer's own."""
        own = self.target.tokenizer.eos_token_id
        return own if own in self.ends else self.ends[0]

    def problem(self, answer: Answer, tokens: Sequence[int]) -> Refused | None:
        """What is wrong with tokens that came as such or were made of a text."""
        vocabulary = self.target.model.config.get_text_config(decoder=True).vocab_size
        most = self.config.sampling.max_new_tokens
        if not tokens:
            return Refused("an answer without tokens")
        if max(tokens) >= vocabulary:
            return Refused(
                f"token {max(tokens)} is not among the target's {vocabulary}: its model is another"
            )
        if len(tokens) > most:
            return Refused(f"{len(tokens)} tokens where {most} were asked for")
        if not answer.ended and len(tokens) < most:
            return Refused(f"cut after {len(tokens)} tokens: the server's context is too small")
        if answer.tokens is not None and answer.ended and not self.same_words(answer, tokens):
            return Refused(
                "the server's text is not what the target's tokenizer makes of its tokens: its "
                "tokenizer is another"
            )
        return None

    def same_words(self, answer: Answer, tokens: Sequence[int]) -> bool:
        """Whether text and tokens agree, but for white space and marks at the edges."""
        own = self.target.tokenizer.decode(list(tokens), skip_special_tokens=True)
        texts = ("".join(filter(str.isalnum, text)) for text in (own, answer.text))
        return len(set(texts)) == 1
