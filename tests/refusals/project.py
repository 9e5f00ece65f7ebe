"""A folder in which wrong command lines are given: models, data, runs and recipes with faults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import yaml
from transformers import GPTJConfig, PreTrainedModel, PreTrainedTokenizerFast

from drafttrain.cli import main
from drafttrain.config.commands import CacheConfig, DistillConfig
from drafttrain.config.decode import SamplingConfig
from drafttrain.config.inputs import DataConfig, TargetConfig
from drafttrain.config.reading import dump_settings
from drafttrain.config.recipes import DrafterConfig, HeadRecipe, SpecDrafterRecipe
from drafttrain.export.folder import CUSTOM_GENERATE, GENERATE
from drafttrain.models.block_heads import BlockHeads, BlockHeadsConfig
from drafttrain.models.identity import hash_target
from tests.export.pairs import make_head
from tests.tiny_models import BOS, EOS, VOCAB, tiny_model
from tests.tiny_targets import tiny_tokenizer

POSITIONS = 256
"""Of targets and drafters: enough for the default of sampling.max_new_tokens."""
LANGUAGE_MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
RUN_SCRIPT = "from pathlib import Path\n\nPath('code-was-run').touch()\n"
"""Written by a model's own code, should it ever be run."""


def make_project(root: Path) -> Path:
    """Models, data, runs and recipes below `root`. The working directory must be `root`."""
    _save_models(root)
    _write_data(root)
    _write_runs(root)
    _write_recipes(root)
    _write_settings(root)
    return root


def _save_models(root: Path) -> None:
    target = tiny_model("marian", max_position_embeddings=POSITIONS).float()
    small = tiny_model("llama", max_position_embeddings=POSITIONS).float()
    save(target, root / "target")
    save(tiny_model("marian", vocab_size=VOCAB + 8).float(), root / "wide")
    save(tiny_model("llama", seed=5, max_position_embeddings=POSITIONS).float(), root / "llama")
    save(small, root / "small")
    save(tiny_model("llama", seed=7).float(), root / "shuffled", _shuffled_tokenizer())
    ids = {"bos_token_id": BOS, "eos_token_id": EOS}
    unknown = GPTJConfig(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, rotary_dim=4, **ids)
    unknown.save_pretrained(root / "unknown")
    tiny_tokenizer().save_pretrained(root / "unknown")
    for name in ("pickled", "half", "untokenized"):
        shutil.copytree(root / "target", root / name)
    torch.save(target.state_dict(), root / "pickled" / "pytorch_model.bin")
    (root / "pickled" / "model.safetensors").unlink()
    weights = (root / "half" / "model.safetensors").read_bytes()
    (root / "half" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    for file in (root / "untokenized").glob("token*"):
        file.unlink()
    (root / "coded").mkdir()
    settings = {"model_type": "mine", "auto_map": {"AutoConfig": "own_code.OwnConfig"}}
    (root / "coded" / "config.json").write_text(json.dumps(settings))
    (root / "coded" / "own_code.py").write_text(RUN_SCRIPT)
    make_head(small).save_pretrained(root / "head")
    other = {"path": "another-drafter", "weights_sha256": "1" * 64}
    make_head(small, drafter=other).save_pretrained(root / "other-head")
    shape = {"k": 4, "hidden_size": 8, "vocab_size": VOCAB, "is_encoder_decoder": True}
    identity = {"path": "target", "weights_sha256": hash_target(target)}
    save(BlockHeads(BlockHeadsConfig(**shape, target=identity)), root / "narrow-blocks")


def save(
    model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None
) -> None:
    model.save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)


def _shuffled_tokenizer() -> PreTrainedTokenizerFast:
    """The same words with w4 and w5 exchanged."""
    state = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    words = state["model"]["vocab"]
    words["w4"], words["w5"] = words["w5"], words["w4"]
    backend = type(tiny_tokenizer().backend_tokenizer).from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


def _write_data(root: Path) -> None:
    rows = [{"source": "w5 w6 w7", "reference": "w8"}, {"source": "w9 w4", "reference": "w7 w6"}]
    lines = [json.dumps(row) for row in rows]
    (root / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (root / "broken.jsonl").write_text(f'{lines[0]}\n{{"source": "w5\n')
    (root / "texts.txt").write_text("w5 w6 w7\nw9 w4\n")
    (root / "table.csv").write_text("question,answer\nw5,w6\n")


def _write_runs(root: Path) -> None:
    """A run of a Spec-Drafter, one of heads, distilled outputs, half of them, a cache."""
    recipe = SpecDrafterRecipe(
        run=Path("begun"),
        target=TargetConfig(path="target"),
        data=DataConfig(path="texts.txt"),
        held_out=DataConfig(path="rows.jsonl"),
        drafter=DrafterConfig(k=4, decoder_layers=1),
    )
    (root / "begun").mkdir()
    (root / "begun" / "run.yaml").write_text(dump_settings(recipe))
    heads = HeadRecipe(
        run=Path("heads"),
        target=TargetConfig(path="llama"),
        drafter="small",
        data=DataConfig(path="texts.txt"),
        held_out=DataConfig(path="rows.jsonl"),
    )
    small = tiny_model("llama").float()
    for depth in (0, 1):
        head = make_head(small, depth)
        head.save_pretrained(root / "heads" / "final" / head.config.name)
    (root / "heads" / "run.yaml").write_text(dump_settings(heads))
    distilled = DistillConfig(
        target=TargetConfig(path="target"),
        data=DataConfig(path="rows.jsonl"),
        out=Path("shards"),
        sampling=SamplingConfig(max_new_tokens=8),
    )
    cached = CacheConfig(
        target=TargetConfig(path="target"),
        drafter="target",
        distilled=Path("shards"),
        out=Path("cache"),
    )
    for command, settings in (("distill", distilled), ("cache", cached)):
        file = root / f"{command}.yaml"
        file.write_text(yaml.safe_dump(settings.model_dump(mode="json", exclude_unset=True)))
        _run([command, "--config", file.name])
    shutil.copytree(root / "shards", root / "unfinished")
    manifest = json.loads((root / "unfinished" / "manifest.json").read_text())
    (root / "unfinished" / "manifest.json").write_text(json.dumps(manifest | {"counts": None}))
    entry = root / "exported" / CUSTOM_GENERATE / "generate.py"
    entry.parent.mkdir(parents=True)
    entry.write_text(GENERATE)


def _run(arguments: list[str]) -> None:
    try:
        main([*arguments, "--debug"])
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"{arguments} ended with {ended.code}") from None


def _write_recipes(root: Path) -> None:
    quick = {"max_steps": 2, "threads": 1}
    recipes = {
        "train_spec_drafter": {
            "run": "new",
            "target": {"path": "target"},
            "data": {"path": "texts.txt"},
            "train": quick,
        },
        "train_block_heads": {
            "run": "new",
            "target": {"path": "target"},
            "data": {"path": "texts.txt"},
            "train": quick,
        },
        "train_causal_drafter": {
            "run": "new",
            "target": {"path": "llama"},
            "data": {"path": "texts.txt"},
            "train": quick,
        },
        "train_parallel_drafter": {
            "run": "new",
            "target": {"path": "llama"},
            "data": {"path": "texts.txt"},
            "train": quick,
        },
        "train_acceptance_head": {
            "run": "new",
            "target": {"path": "llama"},
            "drafter": "small",
            "data": {"path": "texts.txt"},
            "train": quick,
        },
        "train_target": {
            "run": "new",
            "data": {"path": "rows.jsonl"},
            "model": LANGUAGE_MODEL,
            "train": quick,
        },
    }
    for name, settings in recipes.items():
        (root / f"{name}.yaml").write_text(yaml.safe_dump(settings))


def _write_settings(root: Path) -> None:
    (root / "torn.yaml").write_text("target: {path: target\ndata: [\n")
    (root / "no-h.json").write_text(json.dumps({"stop": "head", "head": "D1-w6"}))
