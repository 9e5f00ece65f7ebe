"""Where models and inputs come from."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from drafttrain.config.base import Config, CountOrZero, Precision

RECORDED = ("path", "revision", "language", "task", "source_language", "target_language")
"""Settings of a target that a drafter's config.json has: which it is, and its languages."""
STDIN = "-"
"""`data.path` of lines of standard input."""


class TargetConfig(Config):
    """The large model whose output is to be reproduced faster."""

    path: str
    """Hub name or local folder of the target model."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    dtype: Precision = "float32"
    """Weights and activations while decoding."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    trust_remote_code: bool = False
    """Run Python code that lies beside the model's weights. Off unless you trust its author."""
    language: str | None = None
    """Speech: language of all clips, as de or german. Default: as the target's generation_config
    says, else recognised in each clip."""
    task: Literal["transcribe", "translate"] | None = None
    """Speech: write in the clip's language, or in English. Default: as the target's
    generation_config says, else transcribe."""
    source_language: str | None = None
    """Of the inputs, for targets of many languages (NLLB, M2M100, mBART-50): its code, as
    eng_Latn, en or en_XX. Default: as its tokenizer_config.json says."""
    target_language: str | None = None
    """Of the outputs, likewise. Default: as the target's generation_config says."""

    def recorded(self) -> dict[str, str]:
        """What a drafter's config.json says of its target."""
        return self.model_dump(include=set(RECORDED), exclude_none=True)


class DataConfig(Config):
    """Input texts: a Hub name, a local file (parquet; json, jsonl, csv, txt, also .gz),
    two line-aligned files, or a folder written by `datasets`. For targets that hear: a recording
    (wav, flac, mp3, ogg) or a folder of them, rows that name files beside or below them, or a data
    set with an Audio column; clips of 30 s at most, resampled to 16 kHz and mixed down where
    needed."""

    path: str
    """Hub name, file or folder of the inputs."""
    reference_path: str | None = None
    """Second file, line-aligned with `path`, that holds the references."""
    config_name: str | None = None
    """Configuration of a Hub data set (wmt14: de-en)."""
    split: str = "train"
    """Split of a Hub data set or `datasets` folder."""
    input_column: str | None = None
    """Column of the inputs, texts or chats. Default: the one of messages, conversations,
    conversation, source, prompt, text, document, turns (its first element) that is there; of
    recordings, audio or file. Two of them are refused. translation.en: a field of a column."""
    template: str | None = None
    """The input made of a row's columns, instead of one column: "{question} (A) {choices[0]}"."""
    reference_column: str | None = None
    """Column of the references. Default: the one of reference, target, response, summary,
    canonical_solution that is there; of chats the last assistant turn; of recordings text,
    sentence, transcription or transcript too."""
    prefix: str = ""
    """Text put before every input (T5: "translate English to German: ")."""
    suffix: str = ""
    """Text put after every input ("\\nAnswer:")."""
    chat: bool = False
    """Put every text as a user's message through the tokenizer's chat template (decoder-only
    targets); rows that are chats always are. Columns `tools` and `chat_template_kwargs` go to the
    template too."""
    chat_template_kwargs: dict[str, bool | CountOrZero | float | str] = {}
    """Chats: variables of the template, as {enable_thinking: false}."""
    skip: NonNegativeInt = 0
    """Rows to leave out at the start."""
    limit: PositiveInt | None = None
    """Most rows to use."""
