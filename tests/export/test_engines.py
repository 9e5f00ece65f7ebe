"""Exports for inference engines: what is checked, written and printed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import yaml
from safetensors.torch import load_file, save_file

from drafttrain.commands.export import export
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import EngineName, ExportConfig
from drafttrain.export.engines import ENGINES, Serving
from drafttrain.export.verify import compare
from tests.export.pairs import Change, save_drafter
from tests.tiny_models import VOCAB, tiny_model
from tests.tiny_targets import save_target, tiny_tokenizer

SERVING = Serving("org/big", "exports/mine", "AutoModelForCausalLM", 5, 0.4, VOCAB)


@pytest.fixture(scope="module")
def pair(drafter, tmp_path_factory) -> tuple[Path, Path]:
    """The folders of a drafter and its target."""
    return drafter, save_target(tiny_model("llama"), tmp_path_factory.mktemp("target"))


def exported(pair: tuple[Path, Path], out: Path, engines, **settings: object) -> Path:
    given = {"drafter": pair[0], "target": pair[1], "check": "drafter"} | settings
    given["target"] = given["target"] and {"path": str(given["target"])}
    given["drafter"] = str(given["drafter"])
    export(ExportConfig(out=out, engines=engines, **given), reload=compare)
    return out


def test_one_folder_serves_every_engine(capsys, tmp_path, pair):
    out = exported(pair, tmp_path / "out", tuple(ENGINES), num_assistant_tokens=4)
    printed, card = capsys.readouterr().out, (out / "README.md").read_text()
    for engine in ENGINES.values():
        assert f"{engine.title}:" in printed and f"### {engine.title}" in card
    assert f"convert_hf_to_gguf.py {out} --outtype f16 --outfile {out}/drafter-f16.gguf" in printed
    assert f"-md {out}/drafter-f16.gguf --spec-type draft-simple" in printed
    assert "--spec-draft-n-max 4 --spec-draft-p-min 0" in printed
    assert str(tmp_path) not in card


def wide(root: Path) -> dict[str, object]:
    model = tiny_model("llama", vocab_size=VOCAB + 8)
    return {"target": save_target(model, root / "target")}


def shuffled(root: Path) -> dict[str, object]:
    target = save_target(tiny_model("llama"), root / "target")
    tiny_tokenizer(shuffled=True).save_pretrained(target)
    return {"target": target}


def drafter_of(family: str, **shape: object) -> Change:
    return lambda root: {"drafter": save_target(tiny_model(family, **shape), root / "drafter")}


@pytest.mark.parametrize(
    ("engines", "changes", "says"),
    [
        ("vllm", wide, "--for vllm: .*vocabulary of 40 tokens but target .* has 48"),
        ("tensorrt-llm", shuffled, "different tokenizers: token 4 is 'w4'"),
        ("tensorrt-llm", drafter_of("gpt2"), "does not implement 'GPT2LMHeadModel'"),
        ("vllm", drafter_of("qwen2", head_dim=8), "= 8, .* = 4 for 'Qwen2ForCausalLM'; leave vllm"),
        ("vllm", drafter_of("marian"), "decoder-only language models, but .*'marian'"),
        ("vllm", lambda _: {"target": None}, "names none; add --target MODEL"),
    ],
)
def test_drafters_that_an_engine_cannot_load_are_refused_first(
    tmp_path, pair, engines, changes, says
):
    settings = changes(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=says):
        exported(pair, tmp_path / "out", engines, **settings)
    assert sorted(tmp_path.rglob("*")) == before


SERVERS = "vllm,sglang,tensorrt-llm"


@pytest.mark.parametrize(
    ("engines", "family", "shape"),
    [
        ("vllm", "qwen3", {"head_dim": 8}),
        ("sglang,tensorrt-llm", "qwen2", {"head_dim": 8}),
        (SERVERS, "qwen2", {"tie_word_embeddings": True}),
        (SERVERS, "mistral", {}),
    ],
)
def test_the_servers_take_a_family_with_its_own_settings(tmp_path, pair, engines, family, shape):
    """Transformers 4 uses 4096 as Mistral's window if the setting is missing."""
    model, tied = tiny_model(family, **shape), bool(shape.get("tie_word_embeddings"))
    if tied:
        model.tie_weights()
    drafter = save_target(model, tmp_path / "drafter")
    out = exported(pair, tmp_path / "out", engines, drafter=drafter)
    config = json.loads((out / "config.json").read_text())
    assert config["sliding_window"] is None and "auto_map" not in config
    assert config["tie_word_embeddings"] is tied
    assert config["architectures"] == [type(model).__name__]
    assert config.get("head_dim") == shape.get("head_dim", config.get("head_dim"))
    assert [file.name for file in out.glob("*.safetensors")] == ["model.safetensors"]
    weights = load_file(out / "model.safetensors")
    assert all(name.startswith(("model.", "lm_head.")) for name in weights)
    assert ("lm_head.weight" in weights) is not tied


def test_tensors_that_are_no_part_of_the_drafter_are_not_exported(tmp_path, pair):
    """Loaders fail on such tensors or read them silently."""
    folder = save_drafter(tmp_path / "headed")
    weights = load_file(folder / "model.safetensors")
    stray = {"acceptance_head.out.weight": weights["lm_head.weight"][:1].clone()}
    save_file(weights | stray, folder / "model.safetensors", {"format": "pt"})
    out = exported(pair, tmp_path / "out", "sglang", drafter=folder)
    assert load_file(out / "model.safetensors").keys() == weights.keys()


def test_only_llama_cpp_takes_a_padded_vocabulary(tmp_path, pair):
    """vLLM compares the numbers of embedding rows; llama.cpp accepts a difference of up to 128."""
    out = exported(pair, tmp_path / "out", "llama.cpp", **wide(tmp_path))
    assert (out / "config.json").is_file()


def settings_in(serving: Serving) -> tuple[dict, dict]:
    """Returns the settings in vLLM's and TensorRT-LLM's commands."""
    written = ENGINES["tensorrt-llm"].command(serving).split("'END'\n")[1].split("\nEND")[0]
    vllm = ENGINES["vllm"].command(serving).split("'")[1]
    return json.loads(vllm), yaml.safe_load(written)


def test_engine_notes_name_the_draft_length_and_the_mask_of_parallel_drafters():
    fields = {"method": "draft_model", "model": "exports/mine", "num_speculative_tokens": 5}
    common = {"max_draft_len": 5, "speculative_model": "exports/mine"}
    sequential = {"decoding_type": "Draft_Target", **common}
    own = {"disable_overlap_scheduler": True, "speculative_config": sequential}
    assert settings_in(SERVING) == (fields, own)
    parallel = {"decoding_type": "PARD", **common, "mask_token_id": 7}
    own = {"speculative_config": parallel}
    assert settings_in(replace(SERVING, mask_token=7)) == (
        fields | {"parallel_drafting": True},
        own,
    )


def test_every_engine_can_be_chosen_and_its_notes_are_filled_and_quoted_for_the_shell():
    assert set(get_args(EngineName)) == ENGINES.keys()
    assert not any("{" in engine.notes.format(SERVING) for engine in ENGINES.values())
    serving = replace(SERVING, target="my model", folder="/a b/c")
    assert "vllm serve 'my model'" in ENGINES["vllm"].command(serving)
    assert "-md '/a b/c/drafter-f16.gguf'" in ENGINES["llama.cpp"].command(serving)
