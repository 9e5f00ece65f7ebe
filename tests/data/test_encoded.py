"""Encoder states of rows equal those of the target's module, and are kept if encoding is slow."""

from pathlib import Path

import datasets
import pytest
import torch

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import DataConfig, TargetConfig
from drafttrain.config.recipes import ObjectiveConfig
from drafttrain.data.batches.examples import Example, Examples
from drafttrain.data.distill.distill import distill
from drafttrain.data.encoded import KeptEncodings, batch_encoding, clip_encoding, text_encoding
from drafttrain.data.inputs.clips import clip_source
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.shards.outputs import load_distilled
from drafttrain.models.loading import LoadedTarget, load_target
from drafttrain.training.objectives.mask_predict import MaskPredict
from tests.data.distill.tiny_distill import settings
from tests.tiny_drafters import collator, drafter_of, shared
from tests.tiny_models import tiny_model, tiny_seq2seq
from tests.tiny_speech import save_clips, save_whisper

ROWS = {"source_ids": [[5, 6, 7, 1], [9, 1]], "target_ids": [[4, 1], [8, 8, 1]]}


@pytest.mark.parametrize("family", ["bart", "t5", "longt5", "t5gemma"])
@pytest.mark.parametrize("rows", [[0, 1], [1, 2]], ids=["padded", "alike"])
def test_a_batch_is_encoded_as_each_of_its_texts(family, rows):
    """Also if no source is padded and no mask is passed."""
    model = shared(family) if family in ("bart", "t5") else tiny_seq2seq(family)
    drafter = drafter_of(model, encoder="target")
    sources = [[5, 6, 7, 8, 12, 1], [9, 7, 1], [4, 30, 1]]
    examples = [Example(0, row, sources[row], [4, 8, 1]) for row in rows]
    collate = collator(drafter, 1)
    batch = batch_encoding(LoadedTarget(model, None, "target"))(collate(examples))
    assert (batch.attention_mask is None) == (rows == [1, 2])
    for own, row in zip(batch.encoded, rows, strict=True):
        [expected] = model.get_encoder()(input_ids=torch.tensor([sources[row]]))[0]
        torch.testing.assert_close(own[: len(expected)], expected, rtol=1e-5, atol=1e-5)
        assert not own[len(expected) :].any()
    assert MaskPredict(drafter, ObjectiveConfig())(batch, 0.0).loss.isfinite()


@pytest.fixture
def audio(tmp_path) -> tuple[LoadedTarget, DataConfig]:
    save_whisper(tmp_path / "whisper")
    target = load_target(TargetConfig(path=str(tmp_path / "whisper"), device="cpu"))
    return target, DataConfig(path=str(save_clips(tmp_path / "clips", 3)))


def outputs(audio, out: Path) -> datasets.Dataset:
    target, data = audio
    distill(settings(Path(target.path), str(out), data=data, sampling={"max_new_tokens": 6}))
    return load_distilled(out)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_texts_are_encoded_as_the_target_encodes_them(family):
    model = tiny_model(family)
    target = LoadedTarget(model, None, "target")
    examples = Examples(datasets.Dataset.from_dict(ROWS), text_encoding(target))
    assert len(examples) == 2
    for example in examples.__getitems__([(0, 1), (3, 0)]):
        ids = torch.tensor(example.source_ids)
        with torch.no_grad():
            expected = model.get_encoder()(ids[None])[0][0]
        assert not example.encoded.is_inference()
        torch.testing.assert_close(example.encoded, expected, rtol=1e-6, atol=1e-6)
    assert (example.epoch, example.row, example.target_ids) == (3, 0, [4, 1])


def test_distilling_keeps_encoder_states(audio, tmp_path):
    target, data = audio
    outputs(audio, tmp_path / "out")
    clips = load_inputs(data, audio=True)
    files = KeptEncodings(tmp_path / "out", target.model)
    for clip in clips:
        features = clip_source(target, clip).inputs["input_features"]
        with torch.no_grad():
            [expected] = target.model.get_encoder()(features[None])[0]
        found = files.read(clip["sha256"])
        assert found.dtype == torch.float16
        torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=2e-3)
    assert sorted(tmp_path.rglob("*.safetensors")) == sorted(
        [*map(files.path, clips["sha256"]), tmp_path / "whisper" / "model.safetensors"]
    )


def test_clips_are_encoded_on_first_use_and_read_afterwards(audio, tmp_path):
    target, data = audio
    rows, clips = outputs(audio, tmp_path / "out"), load_inputs(data, audio=True)
    examples = Examples(rows, clip_encoding(target, rows, clips, tmp_path / "other" / "out"))
    [first] = examples.__getitems__([(0, 2)])
    assert len(list(tmp_path.glob("other/encoded/*/*"))) == 1
    assert first.given_ids == rows[2]["prefix_ids"] and len(first.given_ids) > 1
    target.model.model.encoder.forward = None  # nothing is encoded twice
    [again] = examples.__getitems__([(1, 2)])
    assert torch.equal(first.encoded, again.encoded)


def test_a_damaged_file_is_named(audio, tmp_path):
    files = KeptEncodings(tmp_path / "out", audio[0].model)
    files.folder.mkdir(parents=True)
    files.path("abc").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"abc.safetensors cannot be read .*delete it"):
        files.read("abc")
