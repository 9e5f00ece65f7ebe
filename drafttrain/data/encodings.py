"""What a target's encoder made of clips, on disk: a file a clip, in half precision.

Files are named by what the clip holds, below a folder of the target's weights, and appear whole: an
interrupted run goes on, and several runs may share the folder.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.config.base import ConfigError
from drafttrain.data.shards.writing import renamed_when_whole
from drafttrain.decoding.engine.architectures import source_limit
from drafttrain.models.identity import hash_weights

NAME = "encoded"
"""Of the tensor in a file."""


def encoded_bytes(clips: int, target: PretrainedConfig) -> int:
    """Disk that so many clips take, once they are encoded."""
    return 2 * clips * (source_limit(target) or 0) * target.hidden_size


class KeptEncodings:
    """The encodings of one target's clips below a folder, by the SHA-256 of their files."""

    def __init__(self, folder: Path, target: PreTrainedModel) -> None:
        self.folder = folder / hash_weights(target)[:16]

    def path(self, digest: str) -> Path:
        return self.folder / f"{digest}.safetensors"

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def keep(self, digest: str, encoded: Tensor) -> None:
        """Write what the encoder made of a clip, where it is not there yet. Shapes: [S, E]."""
        if self.has(digest):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with renamed_when_whole(self.path(digest)) as temporary:
            save_file({NAME: encoded.half().cpu().contiguous()}, temporary)

    def read(self, digest: str) -> Tensor:
        """Shapes: -> [S, E], float16. Raises ConfigError for a damaged file."""
        path = self.path(digest)
        try:
            return load_file(path)[NAME]
        except (SafetensorError, KeyError, OSError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}); delete it, and the clip is encoded again"
            ) from None
