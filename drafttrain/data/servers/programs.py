"""What is asked of each serving program, and how its answer is read.

All speak OpenAI's /v1/completions; some take settings of their own, and give back token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Question:
    """What a server is to go on with, and how."""

    model: str
    prompt: Sequence[int] | str
    max_new_tokens: int
    temperature: float
    top_k: int
    """0: all tokens."""
    top_p: float
    repetition_penalty: float
    seed: int | None


@dataclass(frozen=True)
class Answer:
    """What a server says."""

    text: str
    ended: bool
    """Whether the model ended it; otherwise it was cut."""
    tokens: Sequence[int] | None
    """None where the server does not tell."""
    read_tokens: int | None
    """Tokens of the prompt, by its own count."""
    made_tokens: int | None
    """Tokens of the answer, by its own count."""


@dataclass(frozen=True)
class Chunk:
    """A part of an answer that comes as it is made."""

    holds_output: bool
    tokens: Sequence[int] = ()
    """Where the server tells them."""
    made_tokens: int | None = None
    """Tokens of the whole answer by the server's own count; in one of the last parts."""
    draft_tokens: int | None = None
    """Tokens drafted for the answer, where the server says it: llama-server."""
    accepted_tokens: int | None = None
    """Those of them that were accepted."""


@dataclass(frozen=True)
class Program:
    """A serving program, by what it says of itself in /v1/models."""

    name: str
    path: str
    write: Callable[[Question], dict[str, Any]]
    read: Callable[[Any], Answer]
    """Raises KeyError, TypeError, IndexError or ValueError for an answer of another shape."""
    read_chunk: Callable[[Any], Chunk]
    """The same of a part of a streamed answer."""
    streamed: Mapping[str, Any]
    """Fields that ask for a streamed answer."""
    counters: str | None = None
    """Page with counters of the whole server, in Prometheus' format (`read_counters`)."""
    warps: bool = True
    """Whether it takes top_k and a repetition penalty, which OpenAI's interface lacks."""


def write_plain(question: Question) -> dict[str, Any]:
    """OpenAI's own fields."""
    asked: dict[str, Any] = {
        "model": question.model,
        "prompt": question.prompt if isinstance(question.prompt, str) else list(question.prompt),
        "max_tokens": question.max_new_tokens,
        "temperature": question.temperature,
        "top_p": question.top_p,
    }
    return asked if question.seed is None else asked | {"seed": question.seed}


def write_sglang(question: Question) -> dict[str, Any]:
    """With what would else be taken from the model's generation_config."""
    return write_plain(question) | {
        "top_k": question.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": question.repetition_penalty,
    }


def write_vllm(question: Question) -> dict[str, Any]:
    return write_sglang(question) | {"return_token_ids": True}


def write_llama(question: Question) -> dict[str, Any]:
    """llama-server's own /completion: the only one that gives tokens; its defaults truncate."""
    asked = write_plain(question)
    return asked | {
        "n_predict": asked.pop("max_tokens"),
        "top_k": question.top_k,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repeat_penalty": question.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "return_tokens": True,
    }


def read_openai(answer: Any) -> Answer:
    [choice] = answer["choices"]
    usage = answer.get("usage") or {}
    tokens = choice.get("token_ids")
    reason = choice["finish_reason"]
    if reason not in ("stop", "length"):
        raise ValueError(f"finish_reason is {reason!r}")
    return Answer(
        text=_text(choice["text"]),
        ended=reason == "stop",
        tokens=None if tokens is None else _ids(tokens),
        read_tokens=_count(usage.get("prompt_tokens")),
        made_tokens=_count(usage.get("completion_tokens")),
    )


def read_llama(answer: Any) -> Answer:
    return Answer(
        text=_text(answer["content"]),
        ended=answer["stop_type"] == "eos",
        tokens=_ids(answer["tokens"]),
        read_tokens=_count(answer.get("tokens_evaluated")),
        made_tokens=_count(answer.get("tokens_predicted")),
    )


def read_openai_chunk(event: Any) -> Chunk:
    """The last one may have no choices, but the usage."""
    choices, usage = event["choices"], event.get("usage") or {}
    text = _text(choices[0]["text"]) if choices else ""
    tokens = _ids((choices[0].get("token_ids") or ()) if choices else ())
    return Chunk(bool(text or tokens), tokens, _count(usage.get("completion_tokens")))


def read_llama_chunk(event: Any) -> Chunk:
    """Counters stand in the last one; without drafts it has none of them."""
    tokens, text = _ids(event["tokens"]), _text(event["content"])
    if not event["stop"]:
        return Chunk(bool(tokens or text), tokens)
    timings = event["timings"]
    made = _count(event["tokens_predicted"])
    drafted, accepted = (_count(timings.get(name)) for name in ("draft_n", "draft_n_accepted"))
    return Chunk(bool(tokens or text), tokens, made, drafted, accepted)


def read_counters(page: str) -> dict[str, float]:
    """Counters by name, summed over their labels: `NAME{label="x"} 3.0` a line.

    Raises ValueError for a page of another shape.
    """
    found: dict[str, float] = {}
    for line in page.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, value = line.partition("{")[0].split()[0], line.rsplit("}", 1)[-1].split()
        number = value[0] if "{" in line else value[1]
        found[name] = found.get(name, 0.0) + float(number)
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("its text is no text")
    return value


def _ids(values: Any) -> list[int]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError("its tokens are no numbers")
    return list(values)


def _count(value: Any) -> int | None:
    return value if type(value) is int else None


_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
_OPENAI = (read_openai, read_openai_chunk, _STREAM)
OPENAI = Program("openai", "/v1/completions", write_plain, *_OPENAI, warps=False)
"""Any other: `transformers serve`, OpenAI's own."""
VLLM = Program("vllm", "/v1/completions", write_vllm, *_OPENAI, counters="/metrics")
SGLANG = Program("sglang", "/v1/completions", write_sglang, *_OPENAI)
LLAMA_CPP = Program(
    "llamacpp", "/completion", write_llama, read_llama, read_llama_chunk, {"stream": True}
)

PROGRAMS = {program.name: program for program in (VLLM, SGLANG, LLAMA_CPP)}
"""By `owned_by` of their models."""
