"""Batched encoding of sources."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.decoding.engine.architectures import attention_windows, device_of
from drafttrain.decoding.engine.compiling import BATCHES, Graphs, source_bucket
from drafttrain.decoding.padding import padded
from drafttrain.decoding.types import Source

CLIPS_AT_ONCE = 2
"""Audio clips per call on a CPU: one clip keeps all cores busy, and larger batches do not fit the
CPU's caches (8 clips take a sixth longer per clip, 24 a third)."""


def given_encoding(sources: Sequence[Source]) -> list[Tensor]:
    """Returns `Source.encoded` of the sources, [S, D] each."""
    assert all(source.encoded is not None for source in sources), "a source is not encoded"
    return [source.encoded for source in sources]


class Encoder:
    """The encoder of an encoder-decoder model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.graphs: Graphs | None = None
        """Compiled calls for texts; None: they run uncompiled."""
        config = getattr(model.get_encoder(), "config", model.config)
        self.has_windows = any(attention_windows(config).values())
        """Whether padding may make states NaN: a row of it beyond a window attends to nothing."""

    def compile(self) -> None:
        """Compiles the calls that encode texts from now on, unless they allow no padding."""
        if not self.has_windows:
            self.graphs = Graphs([self.model], device_of(self.model))

    def __call__(self, sources: Sequence[Source]) -> list[Tensor]:
        """Returns the encoder states of every source, [S, D] each.

        `Source.encoded` is returned unchanged if all sources have it. Texts are padded to one
        length; an encoder with windows gets those of equal length together. Audio features must
        have one shape and are converted to the model's dtype.
        """
        if all(source.encoded is not None for source in sources):
            return given_encoding(sources)
        if all(source.is_text for source in sources):
            texts = [source.input_ids.to(device_of(self.model)) for source in sources]
            ids, mask = padded(texts, self.model.config.pad_token_id or 0)
            lengths = list(map(len, texts))
            if self.has_windows and min(lengths) != max(lengths):
                same = {n: [one for one in sources if len(one.input_ids) == n] for n in lengths}
                encoded = {length: iter(self(group)) for length, group in same.items()}
                return [next(encoded[length]) for length in lengths]
            rows = next((size for size in BATCHES if size >= len(texts)), None)
            if self.graphs is None or self.graphs.failed or rows is None:
                states = self._texts(ids, None if min(lengths) == max(lengths) else mask)
            else:
                states = self._compiled_texts(ids, mask, rows)
            return [own[:length] for own, length in zip(states, lengths, strict=False)]
        return self._clips(sources)

    def _texts(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Encodes ids [B, S] with mask [B, S] (1 = token; None: no padding) -> states [B, S, D]."""
        return self.model.get_encoder()(input_ids=ids, attention_mask=mask)[0]

    def _compiled_texts(self, ids: Tensor, mask: Tensor, rows: int) -> Tensor:
        """Runs `_texts` compiled, with the batch padded to `rows` and to a bucket of lengths."""
        count, length = ids.shape
        padding = (0, source_bucket(length) - length, 0, rows - count)
        ids, mask = F.pad(ids, padding), F.pad(mask, padding)
        mask[count:, 0] = 1  # fully masked rows would give NaN
        name = f"encoding of {rows} texts of up to {ids.shape[1]} tokens"
        return self.graphs.run(ids.shape, self._texts, {"ids": ids, "mask": mask}, name)

    def _clips(self, sources: Sequence[Source]) -> list[Tensor]:
        encoder, device = self.model.get_encoder(), device_of(self.model)
        at_once = CLIPS_AT_ONCE if device.type == "cpu" else len(sources)
        encoded: list[Tensor] = []
        for start in range(0, len(sources), at_once):
            inputs = [source.inputs for source in sources[start : start + at_once]]
            batch = {
                name: torch.stack([clip[name] for clip in inputs]).to(device) for name in inputs[0]
            }
            floating = [name for name, value in batch.items() if value.is_floating_point()]
            batch |= {name: batch[name].to(self.model.dtype) for name in floating}
            encoded += encoder(**batch)[0]
        return encoded
