"""Files that are read cannot run code or access files outside their folder.

Every malicious file below would create a file `code-was-run` if its code were executed.
"""

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from drafttrain.build.pairing import check_methods
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import ExportConfig
from drafttrain.config.decode import DecodeConfig, StopConfig
from drafttrain.config.inputs import DataConfig
from drafttrain.data.distill.distill import distill
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.shards.outputs import Manifest, load_distilled
from drafttrain.export.parts import load_parts
from drafttrain.models.acceptance_head import load_heads
from drafttrain.models.drafters import load_drafter, read_drafter_settings
from drafttrain.models.loading import check_target, load_target, load_tokenizer
from drafttrain.training.checkpoints import PROGRESS, CheckpointError, checkpoint_folders
from tests.data.distill.tiny_distill import settings
from tests.export.pairs import save_drafter, save_head
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target, target_at
from tests.training.tiny_runs import SIX_STEPS, small_task, train_small

PROJECT = Path(__file__).parents[1]
MARK = "code-was-run"
PICKLES = ("pickle", "dill", "cloudpickle", "shelve")
CODE = f"from pathlib import Path\n\nPath({MARK!r}).touch()\n"
WEIGHTS = "model.safetensors"


class Malicious:
    """An object that calls `Path.touch` when unpickled."""

    def __reduce__(self):
        return Path.touch, (Path(MARK),)


def write_malicious(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(pickle.dumps(Malicious()))


def change(file: Path, **values: object) -> None:
    """Changes values of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refused(match: str, read: Callable, *given: object, error: type[Exception] = ConfigError):
    with pytest.raises(error, match=match):
        read(*given)


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not Path(MARK).exists(), "code from a file was run"


@pytest.fixture
def target(tmp_path) -> Path:
    return save_target(tiny_model("marian"), tmp_path / "target")


@pytest.fixture
def drafter(tmp_path) -> Path:
    return save_drafter(tmp_path / "drafter")


@pytest.fixture
def head(tmp_path) -> Path:
    return save_head(tmp_path / "head", tiny_model("llama"))


def test_the_malicious_pickle_would_run():
    write_malicious(Path("x.pkl"))
    pickle.loads(Path("x.pkl").read_bytes())
    Path(MARK).unlink()
    torch.save(Malicious(), "x.pt")
    torch.load("x.pt", weights_only=False)
    Path(MARK).unlink()


# models, heads and tables are no pickles


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "state.ckpt"])
def test_pickled_weights_of_a_target_are_refused_by_name(target, name):
    (target / WEIGHTS).unlink()
    write_malicious(target / name)
    for check in (check_target, load_target):
        refused(rf"target.path.*{name}, a pickle", check, target_at(target))


def test_pickled_weights_of_drafters_and_heads_are_refused_by_name(drafter, head):
    for folder in (drafter, head):
        (folder / WEIGHTS).unlink()
        write_malicious(folder / "pytorch_model.bin")
    refused(r"drafter .*pytorch_model\.bin, a pickle", read_drafter_settings, str(drafter))
    config = AutoConfig.from_pretrained(drafter)
    refused("safetensors are needed", load_drafter, drafter, config)
    refused(r"head .*pytorch_model\.bin, a pickle", load_heads, head)


def test_a_pickle_under_the_name_of_safetensors_is_not_run(target, head):
    for folder in (target, head):
        torch.save(Malicious(), folder / WEIGHTS)
    refused("not a complete safetensors file", load_target, target_at(target))
    refused("not a complete safetensors file", load_heads, head)


FOLDERS = [f"rows/rows.{ending}" for ending in ("pkl", "jsonl", "parquet", "arrow")]


@pytest.mark.parametrize("name", ["a.pkl", "a.pt", "a.bin", "a.npy", "a", *FOLDERS])
def test_a_pickle_is_no_table_of_inputs(name):
    write_malicious(Path(name))
    says = "rows" if name in FOLDERS else f"{name}' cannot be read as text"
    refused(says, load_inputs, DataConfig(path=name.split("/")[0]))


def test_a_pickle_in_the_place_of_a_shard_is_not_run_and_no_manifest_names_another(target):
    out = Path("shards")
    distill(settings(target, "shards", sentences=2))
    write_malicious(Manifest.path(out, 0))
    refused("shard-00000.parquet cannot be read", load_distilled, out)
    change(out / "manifest.json", shards=["../../x.parquet"])
    refused("shards = .*x.parquet", load_distilled, out)
    assert Manifest.path(out, 3) == out / "shard-00003.parquet"


def test_no_source_file_unpickles():
    """Nor does any ask a library to do so; such calls occur only inside the libraries."""
    words = ["pickle.load", "torch.load(", "allow_pickle", "weights_only=False", "yaml.load("]
    words += [f"{verb} {one}" for verb in ("import", "from") for one in PICKLES]
    files = [*(PROJECT / "drafttrain").rglob("*.py"), *(PROJECT / "recipes").rglob("*.py")]
    assert len(files) > 50
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert not [word for word in words if word in text], file


# checkpoints of a run

SHORT = SIX_STEPS.model_copy(update={"max_steps": 2, "checkpoint_every": 1})


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of two steps with its checkpoints."""
    run = tmp_path_factory.mktemp("trained") / "run"
    train_small(small_task(), SHORT, run)
    return run


def resuming_is_refused(run: Path, match: str) -> None:
    refused(match, train_small, small_task(), SHORT, run, error=CheckpointError)


def test_state_or_weights_of_a_run_that_could_run_code_are_refused(trained, tmp_path):
    """An attacker who can write a file can also write its digest, as here."""
    newest = checkpoint_folders(trained)[-1]
    state = [file.name for file in (newest / "state").iterdir() if file.suffix != ".safetensors"]
    assert "optimizer.bin" in state and any(name.endswith(".pkl") for name in state)
    names = [f"state/{name}" for name in (*state, "custom_checkpoint_0.pkl")]
    for number, name in enumerate([*names, "weights.safetensors"]):
        run = Path(shutil.copytree(trained, tmp_path / f"run{number}"))
        checkpoint = checkpoint_folders(run)[-1]
        torch.save({"step": Malicious()}, checkpoint / name)
        files = json.loads((checkpoint / PROGRESS).read_text())["files"]
        digest = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
        change(checkpoint / PROGRESS, files=files | {name: digest})
        resuming_is_refused(run, "cannot be read as plain numbers")


def test_a_checkpoint_lists_files_of_its_own_only(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "secret").write_text("s")
    for name in ("../../../secret", str(tmp_path / "secret")):
        digest = hashlib.sha256(b"s").hexdigest()
        change(checkpoint_folders(run)[-1] / PROGRESS, files={name: digest})
        resuming_is_refused(run, "lies outside")


# code in a model's folder


@pytest.fixture
def coded(tmp_path) -> Path:
    """A model with its own code for configuration, weights, tokenizer and generation."""
    folder = save_target(tiny_model("marian"), tmp_path / "coded")
    own = {"AutoConfig": "own_code.Own", "AutoModelForSeq2SeqLM": "own_code.Own"}
    change(folder / "config.json", model_type="own", auto_map=own)
    own = {"AutoTokenizer": ["own_code.Own", None]}
    change(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map=own)
    (folder / "own_code.py").write_text(CODE)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(CODE)
    return folder


def test_code_of_a_model_is_refused_unless_it_is_allowed(coded, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    for read in (check_target, load_target):
        remedy = "target.trust_remote_code=true if you trust its author"
        refused(remedy, read, target_at(coded))
    refused("drafter .* needs its own Python code", read_drafter_settings, str(coded))
    refused("head .* needs its own Python code", load_heads, coded)
    refused("its tokenizer cannot be loaded", load_tokenizer, target_at(coded))
    assert not Path(MARK).exists()
    with pytest.raises((ConfigError, AttributeError)):  # the code defines no class: it ran
        check_target(target_at(coded, trust_remote_code=True))
    Path(MARK).unlink()


def test_code_next_to_a_model_of_a_known_family_is_ignored(coded):
    change(coded / "config.json", model_type="marian")
    change(coded / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    target = load_target(target_at(coded))
    inputs = target.tokenizer("w5 w6", return_tensors="pt")
    target.model.generate(**inputs, max_new_tokens=2)
    load_drafter(coded, read_drafter_settings(str(coded)))


def test_a_script_next_to_inputs_is_not_run():
    Path("rows").mkdir()
    Path("rows/rows.py").write_text(CODE)
    Path("rows/rows.jsonl").write_text('{"text": "w5"}\n')
    refused(r"scripts are no longer supported.*rows\.py", load_inputs, DataConfig(path="rows"))


# names in files cannot lead outside their folder


@pytest.mark.parametrize(
    "name", ["../other/model.safetensors", "/etc/passwd", "..\\x.safetensors", "model.bin", 7]
)
def test_an_index_of_shards_names_safetensors_of_its_own_folder_only(target, name):
    shutil.copytree(target, "other")
    (target / WEIGHTS).unlink()
    write_malicious(target / "model.bin")
    index = {"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": name}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    says = "is not a safetensors file in the model's own folder"
    refused(says, check_target, target_at(target))


@pytest.mark.parametrize("name", ["adapter_model.bin", "own.safetensors.index.json", "../x"])
def test_weights_that_config_json_names_are_safetensors_of_its_own_folder(target, name):
    change(target / "config.json", transformers_weights=name)
    torch.save(load_file(target / WEIGHTS), target / "adapter_model.bin")
    says = f"transformers_weights .* names '{name}', which"
    refused(says, load_target, target_at(target))
    refused(says, read_drafter_settings, "target")
    shutil.copyfile(target / WEIGHTS, target / "own.safetensors")
    change(target / "config.json", transformers_weights="own.safetensors")
    load_target(target_at(target))


def test_a_sharded_model_of_plain_names_loads(target):
    model = AutoModelForSeq2SeqLM.from_pretrained(target)
    (target / WEIGHTS).unlink()
    model.save_pretrained(target, max_shard_size="8KB")
    assert len(list(target.glob("model-*.safetensors"))) > 1
    assert load_target(target_at(target)).model.num_parameters() == model.num_parameters()


@pytest.mark.parametrize("name", ["../secret", "/etc", "secret/../../secret"])
def test_a_policy_names_heads_of_its_own_run_only(drafter, name):
    """A head exists at the path that the name would lead to, but it is not loaded."""
    run, model = Path("run"), tiny_model("llama")
    for depth in (0, 1):
        save_head(run / "final" / f"D{depth}-w6", model, depth=depth)
    save_head(run / "secret", model)
    for folder in (run, run / "final"):
        policy = {"stop": "head", "h": 0.5, "head": name}
        (folder / "policy.json").write_text(json.dumps(policy))
    exported = ExportConfig(drafter=str(drafter), head=run, out=Path("out"))
    refused("2 heads", load_parts, exported)
    stop = StopConfig(kind="head", head=str(run))
    refused("2 heads", check_methods, DecodeConfig(drafter=str(drafter), stop=stop))


@pytest.mark.parametrize("field", ["depth", "rejection_weight"])
def test_a_head_is_named_by_numbers_only(head, field):
    """They are part of its folder's name."""
    change(head / "config.json", **{field: "../../x"})
    refused(f"{field} = '../../x'", load_heads, head)
