"""Targets load, or are refused with one sentence on what to change."""

import io
import json
import tomllib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch

import drafttrain
from drafttrain.config.base import ConfigError
from drafttrain.models import loading
from drafttrain.models.loading import (
    LoadedTarget,
    cache_for_generate,
    cache_is_deep_enough,
    check_target,
    choose_device,
    load_target,
    report_generate_defaults,
)
from tests.tiny_models import EOS, MEL_BINS, tiny_model
from tests.tiny_speech import save_whisper
from tests.tiny_targets import save_target, target_at


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_target(tiny_model("marian"), tmp_path)


def test_a_saved_model_loads_with_its_tokenizer_in_eval_mode(folder):
    target = load_target(target_at(folder))
    assert target.tokenizer("w5 w6")["input_ids"] == [5, 6, EOS]
    assert (target.model.training, target.model.dtype) == (False, torch.float32)
    assert target.path == str(folder)
    assert load_target(target_at(folder, dtype="bfloat16")).model.dtype == torch.bfloat16


NONE = ("", "{", "[1]", "null")
"""Texts of JSON files that hold no object."""
TOKENIZER = r"its tokenizer cannot be loaded \("
SPOILED = {
    "config.json": (r"does not describe a model \(", (*NONE, '{"vocab_size": 4}', "\x00")),
    "tokenizer.json": (TOKENIZER, (*NONE, '{"model": {"type": "BPE"}}')),
    "tokenizer_config.json": (TOKENIZER, (*NONE, '{"added_tokens_decoder": 3}')),
    "generation_config.json": (r"generation_config\.json cannot be read \(", NONE[:3]),
}
"""The message for each file with each of these texts."""


@pytest.mark.parametrize(
    ("file", "text"), [(file, text) for file, (_, texts) in SPOILED.items() for text in texts]
)
def test_a_spoiled_file_is_refused_before_weights_are_read(folder, file, text):
    (folder / "model.safetensors").unlink()
    (folder / file).write_text(text)
    with pytest.raises(ConfigError, match=SPOILED[file][0]):
        load_target(target_at(folder))


def test_a_missing_tokenizer_is_named_before_weights_are_read(folder):
    for file in (*folder.glob("tokenizer*"), folder / "model.safetensors"):
        file.unlink()
    with pytest.raises(ConfigError, match="there is no tokenizer in it"):
        load_target(target_at(folder))


def test_a_torn_file_of_weights_is_refused_with_its_name_before_it_is_read(folder):
    file = folder / "model.safetensors"
    for kept in (400, 7, 0):
        file.write_bytes(file.read_bytes()[:kept])
        with pytest.raises(ConfigError, match=r"model.safetensors is not a complete safetensors"):
            check_target(target_at(folder))


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("pytorch_model.bin", "drafttrain convert"),
        ("model-q4.gguf", "model-q4.gguf, but safetensors are needed"),
        ("flax_model.msgpack", "flax_model.msgpack, but safetensors are needed"),
        ("adapter_config.json", "an adapter .* merge it"),
    ],
)
def test_weights_for_other_programs_are_named(folder, file, says):
    (folder / file).write_text("{}")
    if "adapter" in file:  # next to a whole model too
        with pytest.raises(ConfigError, match=says):
            check_target(target_at(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=says):
        check_target(target_at(folder))
    (folder / "config.json").unlink()
    says = says if "adapter" in file else f"no config.json, but {file}"
    with pytest.raises(ConfigError, match=says):
        check_target(target_at(folder))


def test_a_package_that_quantised_weights_need_is_named(folder):
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 8}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="need a package that is not installed .*install it"):
        load_target(target_at(folder))


@pytest.mark.parametrize("path", ["llma", "checkpoints/tinny", "chekpoints/tiny", "./llma"])
def test_a_mistyped_folder_is_answered_at_once_with_the_nearest(tmp_path, monkeypatch, path):
    timeouts = []

    def fail(url, timeout):
        timeouts.append(timeout)
        raise OSError("no network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "get_hf_file_metadata", fail)
    (tmp_path / "checkpoints/tiny").mkdir(parents=True)
    (tmp_path / "llama").mkdir()
    near = "checkpoints/tiny" if "/t" in path else "llama"
    with pytest.raises(ConfigError, match=f"'{path}': no such folder.*; did you mean '{near}'?"):
        check_target(target_at(path))
    assert [seconds <= 10 for seconds in timeouts] == [True] * (not path.startswith("."))


def test_folders_without_a_language_model_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no config.json"):
        load_target(target_at(tmp_path))
    for kind in ("vit", "clip"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(ConfigError, match=f"'{kind}' model, not a language model"):
            check_target(target_at(tmp_path))


def test_devices_that_are_not_there_are_refused(monkeypatch):
    for name in ("gpu", "mps", "xpu", "meta", "cuda:x", "cuda:-1", "cpu:cuda", "tpu", "hpu"):
        with pytest.raises(ConfigError, match=f"target.device = '{name}' is not a device"):
            choose_device(name)
    for name, count in (("cuda", 0), ("cuda:1", 1)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(ConfigError, match=f"'{name}', .* has {count} usable CUDA devices"):
            choose_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(
    ("own", "wanted", "says"),
    [
        ({"num_beams": 6}, (0.0,), "with 6 beams; drafttrain decodes greedily, with 1 beam,"),
        ({"num_beams": 6}, (0.0, 4), "with 6 beams; drafttrain decodes greedily, with 4 beams,"),
        ({"num_beams": 4}, (0.0, 4), None),
        ({"do_sample": True, "temperature": 0.6}, (0.0,), "temperature 0.6; drafttrain decodes gr"),
        ({"do_sample": True, "temperature": 0.6}, (1.0,), "0.6; drafttrain samples at temperature"),
        ({"do_sample": True, "temperature": 0.6}, (0.6,), None),
        ({"do_sample": True}, (1.0,), None),
        ({"num_beams": 2, "do_sample": True}, (0.0,), "2 beams and by sampling at temperature 1;"),
        ({}, (1.0,), None),
    ],
)
def test_a_target_that_decodes_otherwise_by_default_is_reported_once(
    tmp_path, capsys, own, wanted, says
):
    model = tiny_model("marian")
    model.generation_config.update(**own)
    target = LoadedTarget(model, None, str(tmp_path))
    for _ in range(2):
        report_generate_defaults(target, *wanted)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (says is not None) and all(says in line for line in lines)


def test_a_processor_is_loaded_where_inputs_are_no_token_ids(folder):
    assert load_target(target_at(folder)).processor is None
    whisper = target_at(save_whisper(folder / "whisper"))
    processor = load_target(whisper).processor
    features = processor(np.zeros(1600), sampling_rate=16_000, return_tensors="pt")
    assert features["input_features"].shape[1] == MEL_BINS
    (folder / "whisper" / "processor_config.json").unlink()
    with pytest.raises(ConfigError, match="its processor, which converts audio to features"):
        load_target(whisper)


def train_pieces(size: int, **how: object) -> bytes:
    """Returns a SentencePiece model with this number of pieces."""
    texts = [f"the house number {i} is small and the dog {7 * i} is big" for i in range(40)]
    written, how = io.BytesIO(), {"minloglevel": 2, "num_threads": 1} | how
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=written, vocab_size=size, **how
    )
    return written.getvalue()


def test_a_target_with_sentencepiece_files_decodes_as_opus_mt_does(tmp_path):
    model = train_pieces(40)
    for side in ("source", "target"):
        (tmp_path / f"{side}.spm").write_bytes(model)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    own = [pieces.id_to_piece(i) for i in range(3, len(pieces))]  # after <unk>, <s> and </s>
    tokens = ["<pad>", "</s>", "<unk>", *own, "<s>"]
    (tmp_path / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(tokens)}))
    settings = {"tokenizer_class": "MarianTokenizer", "source_lang": "en", "target_lang": "de"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tiny_model("marian", vocab_size=len(tokens)).save_pretrained(tmp_path)
    decoder = drafttrain.load(str(tmp_path))
    text = "the small dog"
    ids = decoder.tokenizer(text).input_ids
    assert decoder.tokenizer.decode(ids, skip_special_tokens=True) == text
    [found] = decoder.generate([text], max_new_tokens=5)
    assert found.tokens


@pytest.mark.parametrize(
    ("family", "file"),
    [("t5", "spiece.model"), ("mbart", "sentencepiece.bpe.model"), ("llama", "tokenizer.model")],
)
def test_sentencepiece_files_alone_are_a_tokenizer_with_the_declared_packages(
    tmp_path, family, file
):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = {name.partition(">")[0] for name in project["dependencies"]}
    assert {"sentencepiece", "protobuf"} <= declared  # Transformers needs both to read the files
    kind = "bpe" if family == "llama" else "unigram"
    (tmp_path / file).write_bytes(train_pieces(50, model_type=kind, pad_id=3))
    tiny_model(family, vocab_size=120).save_pretrained(tmp_path)
    languages = {"source_language": "en_XX", "target_language": "ro_RO"}
    tokenizer = load_target(target_at(tmp_path, **languages if family == "mbart" else {})).tokenizer
    ids = tokenizer("the small dog").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the small dog"


@pytest.mark.parametrize("decoder_layers", [1, 2, 3])
def test_generate_gets_our_cache_only_where_its_own_has_too_few_layers(decoder_layers):
    model = tiny_model("t5", num_decoder_layers=decoder_layers)
    ids = torch.tensor([[5, 9, 1]])
    how = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert cache_is_deep_enough(model.config) == (decoder_layers < 3)
    with nullcontext() if decoder_layers < 3 else pytest.raises(IndexError):
        assert model.generate(ids, **how).shape[1] > 1
    assert model.generate(ids, **how, **cache_for_generate(model)).shape[1] > 1
    assert cache_is_deep_enough(tiny_model("llama").config)
