"""Encoder states of the target, for drafters that read them instead of encoding sources.

Texts are encoded when they are needed, a batch per call. Clips take much longer (the encoder always
reads 30 s), so their states are kept on disk in half precision, one file per clip, next to the
distilled outputs: the folder is named by the hash of the target's weights, the file by the clip's
SHA-256. A file is written by the distillation, or when it is first read.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import datasets
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.config.base import ConfigError
from drafttrain.data.batches.examples import Complete, Example
from drafttrain.data.batches.slots import SlotBatch
from drafttrain.data.inputs.clips import DIGESTS, clip_source
from drafttrain.data.shards.store import write_tensors
from drafttrain.decoding.engine.encoding import Encoder
from drafttrain.decoding.engine.forward import additive
from drafttrain.decoding.engine.sources import make_source
from drafttrain.models.identity import hash_weights
from drafttrain.models.loading import LoadedTarget

NAME = "encoded"
"""Name of the tensor in a file."""
OWN_MASKS = ("attention_type", "encoder_attention_type", "attention_window", "sliding_window")
"""Settings of encoders with local or sparse attention (LongT5, BigBird-Pegasus, T5Gemma), which
build their own masks; all others accept additive 4D masks."""


def text_encoding(target: LoadedTarget) -> Complete:
    """Returns a function that adds encoder states to text examples, encoded in one call."""

    def complete(examples: list[Example]) -> list[Example]:
        sources = [make_source(example.source_ids, target.model) for example in examples]
        with torch.no_grad():
            encoded = Encoder(target.model)(sources)
        return [e._replace(encoded=own) for e, own in zip(examples, encoded, strict=True)]

    return complete


def source_mask(encoder: PreTrainedModel, mask: Tensor) -> Tensor:
    """Returns the mask for an encoder and cross-attention to it: [B, S], or additive [B, 1, 1, S].
    With the first, Transformers inspects its values: a device synchronisation. Shapes: [B, S]."""
    settings = encoder.config.get_text_config().to_dict()
    if any(settings.get(name) for name in OWN_MASKS):
        return mask
    return additive(mask[:, None, None, :] > 0, encoder.dtype)


def batch_encoding(target: LoadedTarget) -> Callable[[SlotBatch], SlotBatch]:
    """Returns a function that adds encoder states to a batch of texts, on its device."""

    def complete(batch: SlotBatch) -> SlotBatch:
        ids, mask, encoder = batch.input_ids, batch.attention_mask, target.model.get_encoder()
        with torch.no_grad():
            if mask is None:
                return replace(batch, encoded=encoder(input_ids=ids)[0])
            states = encoder(input_ids=ids, attention_mask=source_mask(encoder, mask))[0]
        return replace(batch, encoded=states.masked_fill(mask[..., None] == 0, 0.0))

    return complete


class KeptEncodings:
    """Encoder states of clips for one target, stored next to its distilled outputs by SHA-256."""

    def __init__(self, distilled: Path, target: PreTrainedModel) -> None:
        self.folder = distilled.absolute().parent / "encoded" / hash_weights(target)[:16]

    def path(self, digest: str) -> Path:
        return self.folder / f"{digest}.safetensors"

    def keep(self, digest: str, encoded: Tensor) -> None:
        """Writes the encoder states of a clip unless its file exists. Shapes: [S, E]."""
        if self.path(digest).is_file():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_tensors(self.path(digest), {NAME: encoded.half()})

    def read(self, digest: str) -> Tensor:
        """Reads encoder states, [S, E] float16. Raises ConfigError for a damaged file."""
        path = self.path(digest)
        try:
            return load_file(path)[NAME]
        except (SafetensorError, KeyError, OSError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}); delete it, and the clip is encoded again"
            ) from None


def clip_encoding(
    target: LoadedTarget, rows: datasets.Dataset, clips: datasets.Dataset, distilled: Path
) -> Complete:
    """Returns a function that adds encoder states to examples of clips: encoded once, then read
    from disk. rows: the distilled rows of the folder `distilled`; clips: the inputs that they were
    distilled from (`as_clips`)."""
    kept = KeptEncodings(distilled, target.model)
    indices = {number: index for index, number in enumerate(clips["row"][:])}
    numbers, digests = rows["row"][:], clips[DIGESTS][:]

    def complete(examples: list[Example]) -> list[Example]:
        completed = []
        for example in examples:
            index = indices[numbers[example.row]]
            if not kept.path(digests[index]).is_file():
                with torch.no_grad():
                    [encoded] = Encoder(target.model)([clip_source(target, clips[index])])
                kept.keep(digests[index], encoded)
            completed.append(example._replace(encoded=kept.read(digests[index])))
        return completed

    return complete
