"""Settings of targets and input data."""

from os.path import expanduser
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, NonNegativeInt, PositiveInt

from drafttrain.config.base import Config, CountOrZero, Precision

RECORDED = ("path", "revision", "language", "task", "source_language", "target_language")
"""Target settings that are recorded in a drafter's config.json: the model and its languages."""
STDIN = "-"
"""The `data.path` that stands for the lines of standard input."""
Location = Annotated[str, AfterValidator(expanduser)]
"""File, folder or Hub name; a leading `~` is the home folder."""
LocalPath = Annotated[Path, AfterValidator(lambda path: Path(expanduser(path)))]
"""The same for files and folders of this machine."""
Affix = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]
"""Text that may be empty: `prefix=` on a command line is read as null."""


class TargetConfig(Config):
    """The large model whose outputs drafttrain reproduces faster."""

    path: Location
    """Hub name or local folder of the target model."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    dtype: Precision = "float32"
    """Weights and activations while decoding."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    trust_remote_code: bool = False
    """Run Python code from the model's folder. Turn it on only if you trust the author."""
    language: str | None = None
    """Speech: language of all clips (de, german). Default: the target's, else detected in each."""
    task: Literal["transcribe", "translate"] | None = None
    """Speech: transcribe in the clip's language, or translate to English. Default: the target's."""
    source_language: str | None = None
    """Language code of the inputs for multilingual targets (NLLB, M2M100, mBART-50), such as
    eng_Latn, en or en_XX. Default: that of tokenizer_config.json."""
    target_language: str | None = None
    """Language code of their outputs. Default: that of the target's generation_config."""

    def recorded(self) -> dict[str, str]:
        """Returns the settings to record in a drafter's config.json."""
        return self.model_dump(include=set(RECORDED), exclude_none=True)


class DataConfig(Config):
    """Input texts: a Hub name, a local file (parquet; json, jsonl, csv, txt, also .gz), two
    line-aligned files, or a folder written by `datasets`. For speech targets: an audio file (wav,
    flac, mp3, ogg), a folder of them, rows that name files in or below their folder, or a data set
    with an Audio column. Clips are at most 30 s long and resampled to 16 kHz mono."""

    path: Location
    """Hub name, file or folder of the inputs."""
    reference_path: Location | None = None
    """Second file, line-aligned with `path`, that holds the references."""
    config_name: str | None = None
    """Configuration of a Hub data set (wmt14: de-en)."""
    split: str = "train"
    """Split of a Hub data set or `datasets` folder."""
    input_column: str | None = None
    """Column of the inputs, texts or chats. Default: the only column named messages, conversations,
    conversation, source, prompt, text, document or turns (its first element is used); for speech,
    audio or file. If several exist, name one. `translation.en` is a field of a column."""
    template: str | None = None
    """Text with several columns of a row, not one column: "{question} (A) {choices[0]}"."""
    reference_column: str | None = None
    """Column of the references. Default: reference, target, response, summary, canonical_solution;
    for chats the last assistant turn; for speech also text, sentence, transcription, transcript."""
    prefix: Affix = ""
    """Text put before every input (T5: "translate English to German: ")."""
    suffix: Affix = ""
    """Text put after every input ("\\nAnswer:")."""
    chat: bool = False
    """Format texts as user messages with the tokenizer's chat template (decoder-only targets), as
    rows that are chats always are, with their columns `tools` and `chat_template_kwargs`."""
    chat_template_kwargs: dict[str, bool | CountOrZero | float | str] = {}
    """Variables passed to the chat template, such as {enable_thinking: false}."""
    skip: NonNegativeInt = 0
    """Number of rows to skip at the start."""
    limit: PositiveInt | None = None
    """Largest number of rows to use."""
