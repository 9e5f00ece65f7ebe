"""A project folder with faulty inputs, and checks of how commands and recipes refuse them."""

import io
import json
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from unittest import mock

import datasets
import huggingface_hub
import torch
import yaml
from transformers import (
    BloomConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MambaConfig,
    PreTrainedModel,
    ViTConfig,
)

from drafttrain.cli import main
from drafttrain.export.folder import CUSTOM_GENERATE, GENERATE
from drafttrain.models.acceptance_head import AcceptanceHead
from drafttrain.models.block_heads import BlockHeads, BlockHeadsConfig
from drafttrain.models.identity import hash_target
from tests.commanding import ended
from tests.export.pairs import make_head
from tests.small_pair import save_run
from tests.tiny_models import BOS, EOS, VOCAB, tiny_model
from tests.tiny_targets import save_target, tiny_tokenizer

LONG = {"max_position_embeddings": 256}
"""Enough positions for the default of sampling.max_new_tokens."""
LANGUAGE_MODEL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
LANGUAGE_MODEL |= {"model_type": "llama", "num_attention_heads": 2}
OWN_SETTINGS = {
    "train_spec_drafter": {"target": {"path": "target"}},
    "train_block_heads": {"target": {"path": "target"}},
    "train_causal_drafter": {"target": {"path": "llama"}},
    "train_state_drafter": {"target": {"path": "llama"}},
    "train_acceptance_head": {"target": {"path": "llama"}, "drafter": "small"},
    "train_target": {"data": {"path": "rows.jsonl"}, "model": LANGUAGE_MODEL},
}
"""Settings of each recipe that differ from the others'."""
RECIPES: dict[str, Callable[[Sequence[str]], None]] = {
    f"{name}.py": import_module(f"recipes.{name}").main for name in OWN_SETTINGS
}


def make_project(root: Path) -> Path:
    """Makes models, data, runs and recipes in `root`, which must be the working directory."""
    target, small = (tiny_model(family, **LONG).float() for family in ("marian", "llama"))
    save_target(target, root / "target")
    save_target(tiny_model("marian", vocab_size=VOCAB + 8).float(), root / "wide")
    save_target(tiny_model("llama", seed=5, **LONG).float(), root / "llama")
    save_target(small, root / "small")
    save_target(small, root / "shuffled")
    tiny_tokenizer(shuffled=True).save_pretrained(root / "shuffled")
    ids = {"vocab_size": VOCAB, "bos_token_id": BOS, "eos_token_id": EOS}
    for name, config in {
        "unknown": GPTJConfig(n_embd=16, n_layer=1, n_head=2, rotary_dim=4, **ids),
        "alibi": BloomConfig(hidden_size=16, n_layer=2, **ids),
        "mamba": MambaConfig(vocab_size=VOCAB),
        "vit": ViTConfig(),
    }.items():
        config.save_pretrained(root / name)
        tiny_tokenizer().save_pretrained(root / name)
    shape = {"hidden_size": 16, "num_layers": 2, "num_heads": 2}
    local = GPTNeoConfig(**shape, attention_types=[[["global", "local"], 1]], **ids)
    save_target(GPTNeoForCausalLM(local), root / "local")
    for name in ("pickled", "half", "untokenized"):
        shutil.copytree(root / "target", root / name)
    (root / "pickled/model.safetensors").rename(root / "pickled/pytorch_model.bin")
    weights = (root / "half/model.safetensors").read_bytes()
    (root / "half/model.safetensors").write_bytes(weights[: len(weights) // 2])
    for file in (root / "untokenized").glob("token*"):
        file.unlink()
    (root / "coded").mkdir()
    coded = {"model_type": "mine", "auto_map": {"AutoConfig": "own_code.OwnConfig"}}
    (root / "coded/config.json").write_text(json.dumps(coded))
    make_head(small).save_pretrained(root / "head")
    other = {"path": "another-drafter", "weights_sha256": "1" * 64}
    make_head(small, drafter=other).save_pretrained(root / "other-head")
    shape = {"k": 4, "hidden_size": 8, "vocab_size": VOCAB, "is_encoder_decoder": True}
    identity = {"path": "target", "weights_sha256": hash_target(target)}
    blocks = BlockHeads(BlockHeadsConfig(**shape, target=identity))
    save_target(blocks, root / "narrow-blocks")
    _write_files(root)
    _write_runs(root, small)
    return root


def _write_files(root: Path) -> None:
    """Writes inputs, settings files and an earlier export."""
    rows = [{"source": "w5 w6 w7", "reference": "w8"}, {"source": "w9 w4", "reference": "w7 w6"}]
    lines = [json.dumps(row) for row in rows]
    entry = root / "exported" / CUSTOM_GENERATE / "generate.py"
    entry.parent.mkdir(parents=True)
    files = {
        "rows.jsonl": "\n".join(lines) + "\n",
        "broken.jsonl": '{"source": "w5\n',
        "texts.txt": "w5 w6 w7\nw9 w4\n",
        "long.txt": "w5 " * 99,
        "chats.jsonl": '{"messages": [{"role": "user", "content": "w5"}]}\n' * 3,
        "table.csv": "question,answer\nw5,w6\n",
        "torn.yaml": "target: {path: target\ndata: [\n",
        entry: GENERATE,
    }
    for name, text in files.items():
        (root / name).write_text(text)


def _write_runs(root: Path, small: PreTrainedModel) -> None:
    """Makes a finished and an unfinished run, a run of heads, finished and unfinished distilled
    outputs, and a cache."""
    data = {"data": {"path": "texts.txt"}, "held_out": {"path": "rows.jsonl"}}
    save_run(Path("checkpoints/tiny"), Path("target"), Path("rows.jsonl"))
    shutil.copytree(root / "checkpoints/tiny", root / "begun")
    shutil.rmtree(root / "begun/final")
    for depth in (0, 1):
        head = make_head(small, depth)
        head.save_pretrained(root / "heads/final" / head.config.name)
    heads = {"run": "heads", "target": {"path": "llama"}, "drafter": "small", **data}
    (root / "heads/run.yaml").write_text(yaml.safe_dump(heads))
    for line in (
        "distill --target target --data rows.jsonl --out shards sampling.max_new_tokens=8",
        "cache --target target --drafter target --distilled shards --out cache",
    ):
        assert ended(*line.split()) == 0
    shutil.copytree(root / "shards", root / "unfinished")
    manifest = json.loads((root / "unfinished/manifest.json").read_text())
    (root / "unfinished/manifest.json").write_text(json.dumps(manifest | {"counts": None}))
    for name, settings in OWN_SETTINGS.items():
        common = {"run": "new", "data": data["data"], "train": {"max_steps": 2, "threads": 1}}
        (root / f"{name}.yaml").write_text(yaml.safe_dump(common | settings))


@dataclass(frozen=True)
class Refusal:
    """Result of a command."""

    code: int
    out: str
    error: str
    loaded: tuple[str, ...]
    """Classes of the models whose weights were read, except acceptance heads, which are small."""


def refuse(line: str) -> Refusal:
    """Runs a command line in this process. The working directory must be the project."""
    program, *arguments = shlex.split(line)
    out, error = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(error), isolated(), recorded() as loaded:
        try:
            RECIPES.get(program, main)(arguments)
            code = 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
    return Refusal(code, out.getvalue(), error.getvalue(), tuple(loaded))


def check_refusal(project: Path, line: str, says: Sequence[str], weights: bool = False) -> None:
    """Asserts exit code 2, one line that contains all of `says`, and that no files are written.

    weights: whether weights must have been read, because the error is in them; else none are read.
    """
    before = _contents(project)
    refusal = refuse(line)
    assert (refusal.code, refusal.out) == (2, ""), refusal.error
    [printed] = refusal.error.splitlines()
    assert printed.startswith(f"{line.split()[0]}: ")
    for words in says:
        assert words in printed, printed
    assert bool(refusal.loaded) == weights, refusal.loaded
    assert _contents(project) == before


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Records the class names of models that `from_pretrained` is called for."""
    names: list[str] = []
    original = PreTrainedModel.from_pretrained.__func__

    def record(kind: type[PreTrainedModel], *arguments, **settings):
        if not issubclass(kind, AcceptanceHead):
            names.append(kind.__name__)
        return original(kind, *arguments, **settings)

    with mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(record)):
        yield names


@contextmanager
def isolated() -> Iterator[None]:
    """Simulates a machine without Hub access, standard input and GPU. Rows get random fingerprints,
    because `datasets` takes longest to hash the functions that read them."""
    random = datasets.fingerprint.generate_random_fingerprint
    with (
        mock.patch.object(datasets.fingerprint, "update_fingerprint", lambda *_: random()),
        mock.patch.object(datasets.arrow_dataset, "update_fingerprint", lambda *_: random()),
        mock.patch.object(torch.cuda, "device_count", lambda: 0),
        mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
        mock.patch.object(datasets.config, "HF_HUB_OFFLINE", True),
        mock.patch("sys.stdin", io.StringIO()),
    ):
        yield


def _contents(root: Path) -> dict[str, tuple[int, int]]:
    """Returns size and modification time of every file and folder below a root."""
    found = {path: path.stat() for path in root.rglob("*")}
    return {str(path): (facts.st_size, facts.st_mtime_ns) for path, facts in found.items()}
