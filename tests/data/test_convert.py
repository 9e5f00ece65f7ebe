"""Models with pickled weights are converted to safetensors completely or not at all."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.config.inputs import TargetConfig
from drafttrain.models.loading import load_target
from tests.commanding import ended
from tests.test_security import MARK, Malicious
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target


@pytest.fixture
def pickled(tmp_path, monkeypatch) -> Path:
    """A float16 Marian in two pickle files, whose config.json says float64; its parent folder is
    the working directory."""
    monkeypatch.chdir(tmp_path)
    folder = save_target(tiny_model("marian"), tmp_path / "pickled")
    file = folder / "model.safetensors"
    weights = {name: value.half() for name, value in load_file(file).items()}
    file.unlink()
    index = {name: f"pytorch_model-{len(name) % 2}.bin" for name in weights}
    for shard in set(index.values()):
        torch.save({one: weights[one] for one in index if index[one] == shard}, folder / shard)
    entries = {"metadata": {}, "weight_map": index}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(entries))
    (folder / "source.spm").write_bytes(b"pieces")
    torch.save(weights, tmp_path / "weights.bin")
    return folder


def test_the_refusal_of_pickles_names_the_command_that_mends_them(pickled, capsys):
    generate = ("generate", "--drafter", "none", "--text", "w5", "--max-new-tokens", 4)
    assert ended(*generate, "--target", "pickled") == 2
    assert "drafttrain convert --model pickled --out FOLDER" in capsys.readouterr().err
    assert ended("convert", "--model", "pickled", "--out", "whole") == 0
    assert ended(*generate, "--target", "whole") == 0


def test_every_weight_is_kept_to_the_bit_and_every_other_file_as_it_is(pickled):
    assert ended("convert", "--model", "pickled", "--out", "whole") == 0
    before = torch.load("weights.bin", weights_only=True)
    after = load_file("whole/model.safetensors")
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert {value.dtype for value in after.values()} == {torch.float16}
    kept = {one.name for one in pickled.iterdir()} - {one.name for one in Path("whole").iterdir()}
    assert all("pytorch_model" in name for name in kept)
    assert Path("whole/source.spm").read_bytes() == b"pieces"
    assert load_target(TargetConfig(path="whole", dtype="float16")).model.dtype == torch.float16


def test_pickles_outside_the_folder_are_refused(pickled, capsys):
    index = pickled / "pytorch_model.bin.index.json"
    index.write_text(index.read_text().replace("pytorch_model-0.bin", "../pytorch_model-0.bin"))
    (pickled / "pytorch_model-0.bin").rename("pytorch_model-0.bin")
    assert ended("convert", "--model", "pickled", "--out", "whole") == 2
    assert "names '../pytorch_model-0.bin', which is not a bin file" in capsys.readouterr().err
    assert not Path("whole").exists()


@pytest.mark.parametrize("how", [torch.save, lambda one, file: file.write_bytes(pickle.dumps(one))])
def test_pickles_that_hold_more_than_tensors_are_refused_and_not_run(pickled, how):
    (pickled / "pytorch_model.bin.index.json").unlink()
    how({"lm_head.weight": Malicious()}, pickled / "pytorch_model.bin")
    assert ended("convert", "--model", "pickled", "--out", "whole") == 2
    assert not Path(MARK).exists()
    assert not Path("whole").exists() and not list(Path().glob(".whole*"))
