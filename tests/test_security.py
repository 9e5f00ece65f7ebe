"""Files that are read cannot run code or access files outside their folder.

Every malicious file below would create a file `code-was-run` if its code were executed.
"""

import hashlib
import json
import pickle
import shutil
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


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / MARK).exists(), "code from a file was run"


@pytest.fixture
def target(tmp_path) -> Path:
    return save_target(tiny_model("marian"), tmp_path / "target")


def test_the_malicious_pickle_would_run(tmp_path):
    write_malicious(tmp_path / "x.pkl")
    pickle.loads((tmp_path / "x.pkl").read_bytes())
    (tmp_path / MARK).unlink()
    torch.save(Malicious(), tmp_path / "x.pt")
    torch.load(tmp_path / "x.pt", weights_only=False)
    (tmp_path / MARK).unlink()


# models, heads and tables are no pickles


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "state.ckpt"])
def test_pickled_weights_of_a_target_are_refused_by_name(target, name):
    (target / "model.safetensors").unlink()
    write_malicious(target / name)
    for check in (check_target, load_target):
        with pytest.raises(ConfigError, match=rf"target.path.*{name}, a pickle"):
            check(target_at(target))


def test_pickled_weights_of_drafters_and_heads_are_refused_by_name(tmp_path):
    drafter = save_drafter(tmp_path / "drafter")
    head = save_head(tmp_path / "head", tiny_model("llama"))
    for folder in (drafter, head):
        (folder / "model.safetensors").unlink()
        write_malicious(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"drafter .*pytorch_model\.bin, a pickle"):
        read_drafter_settings(str(drafter))
    with pytest.raises(ConfigError, match="safetensors are needed"):
        load_drafter(drafter, AutoConfig.from_pretrained(drafter))
    with pytest.raises(ConfigError, match=r"head .*pytorch_model\.bin, a pickle"):
        load_heads(head)


def test_a_pickle_under_the_name_of_safetensors_is_not_run(target, tmp_path):
    head = save_head(tmp_path / "head", tiny_model("llama"))
    for folder in (target, head):
        torch.save(Malicious(), folder / "model.safetensors")
    for read, place in ((load_target, target_at(target)), (load_heads, head)):
        with pytest.raises(ConfigError, match="not a complete safetensors file"):
            read(place)


@pytest.mark.parametrize("name", ["rows.pkl", "rows.pt", "rows.bin", "rows.npy", "rows"])
def test_a_pickle_is_no_table_of_inputs(tmp_path, name):
    write_malicious(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name}' cannot be read as text"):
        load_inputs(DataConfig(path=name))


@pytest.mark.parametrize("name", ["rows.pkl", "rows.jsonl", "rows.parquet", "rows.arrow"])
def test_a_folder_of_inputs_runs_no_pickle(tmp_path, name):
    write_malicious(tmp_path / "rows" / name)
    with pytest.raises(ConfigError, match="rows"):
        load_inputs(DataConfig(path="rows"))


def test_a_pickle_in_the_place_of_a_shard_is_not_run_and_no_manifest_names_another(
    target, tmp_path
):
    out = tmp_path / "shards"
    distill(settings(target, "shards", sentences=2))
    write_malicious(Manifest.path(out, 0))
    with pytest.raises(ConfigError, match="shard-00000.parquet cannot be read"):
        load_distilled(out)
    change(out / "manifest.json", shards=["../../x.parquet"])
    with pytest.raises(ConfigError, match="shards = .*x.parquet"):
        load_distilled(out)
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
        with pytest.raises(CheckpointError, match="cannot be read as plain numbers"):
            train_small(small_task(), SHORT, run)


def test_a_checkpoint_lists_files_of_its_own_only(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (tmp_path / "secret").write_text("s")
    for name in ("../../../secret", str(tmp_path / "secret")):
        digest = hashlib.sha256(b"s").hexdigest()
        change(checkpoint_folders(run)[-1] / PROGRESS, files={name: digest})
        with pytest.raises(CheckpointError, match="lies outside"):
            train_small(small_task(), SHORT, run)


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


def test_code_of_a_model_is_refused_unless_it_is_allowed(coded, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    remedy = "target.trust_remote_code=true if you trust its author"
    for read in (check_target, load_target):
        with pytest.raises(ConfigError, match=remedy):
            read(target_at(coded))
    with pytest.raises(ConfigError, match="drafter .* needs its own Python code"):
        read_drafter_settings(str(coded))
    with pytest.raises(ConfigError, match="head .* needs its own Python code"):
        load_heads(coded)
    with pytest.raises(ConfigError, match="its tokenizer cannot be loaded"):
        load_tokenizer(target_at(coded))
    assert not (tmp_path / MARK).exists()
    with pytest.raises((ConfigError, AttributeError)):  # the code defines no class: it ran
        check_target(target_at(coded, trust_remote_code=True))
    (tmp_path / MARK).unlink()


def test_code_next_to_a_model_of_a_known_family_is_ignored(coded):
    change(coded / "config.json", model_type="marian")
    change(coded / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    target = load_target(target_at(coded))
    inputs = target.tokenizer("w5 w6", return_tensors="pt")
    target.model.generate(**inputs, max_new_tokens=2)
    load_drafter(coded, read_drafter_settings(str(coded)))


def test_a_script_next_to_inputs_is_not_run(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/rows.py").write_text(CODE)
    (tmp_path / "rows/rows.jsonl").write_text('{"text": "w5"}\n')
    with pytest.raises(ConfigError, match=r"scripts are no longer supported.*rows\.py"):
        load_inputs(DataConfig(path="rows"))


# names in files cannot lead outside their folder


@pytest.mark.parametrize(
    "name", ["../other/model.safetensors", "/etc/passwd", "..\\x.safetensors", "model.bin", 7]
)
def test_an_index_of_shards_names_safetensors_of_its_own_folder_only(target, tmp_path, name):
    shutil.copytree(target, tmp_path / "other")
    (target / "model.safetensors").unlink()
    write_malicious(target / "model.bin")
    index = {"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": name}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="is not a safetensors file in the model's own folder"):
        check_target(target_at(target))


@pytest.mark.parametrize("name", ["adapter_model.bin", "own.safetensors.index.json", "../x"])
def test_weights_that_config_json_names_are_safetensors_of_its_own_folder(target, name):
    change(target / "config.json", transformers_weights=name)
    torch.save(load_file(target / "model.safetensors"), target / "adapter_model.bin")
    for read in (lambda: load_target(target_at(target)), lambda: read_drafter_settings("target")):
        with pytest.raises(ConfigError, match=f"transformers_weights .* names '{name}', which"):
            read()
    shutil.copyfile(target / "model.safetensors", target / "own.safetensors")
    change(target / "config.json", transformers_weights="own.safetensors")
    load_target(target_at(target))


def test_a_sharded_model_of_plain_names_loads(target):
    model = AutoModelForSeq2SeqLM.from_pretrained(target)
    (target / "model.safetensors").unlink()
    model.save_pretrained(target, max_shard_size="8KB")
    assert len(list(target.glob("model-*.safetensors"))) > 1
    assert load_target(target_at(target)).model.num_parameters() == model.num_parameters()


@pytest.mark.parametrize("name", ["../secret", "/etc", "secret/../../secret"])
def test_a_policy_names_heads_of_its_own_run_only(tmp_path, name):
    """A head exists at the path that the name would lead to, but it is not loaded."""
    model = tiny_model("llama")
    drafter = save_drafter(tmp_path / "drafter")
    for depth in (0, 1):
        save_head(tmp_path / "run" / "final" / f"D{depth}-w6", model, depth=depth)
    save_head(tmp_path / "run" / "secret", model)
    policy = {"stop": "head", "h": 0.5, "head": name}
    (tmp_path / "run" / "final" / "policy.json").write_text(json.dumps(policy))
    (tmp_path / "run" / "policy.json").write_text(json.dumps(policy))
    with pytest.raises(ConfigError, match="2 heads"):
        load_parts(ExportConfig(drafter=str(drafter), head=tmp_path / "run", out=Path("out")))
    stop = StopConfig(kind="head", head=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="2 heads"):
        check_methods(DecodeConfig(drafter=str(drafter), stop=stop))


@pytest.mark.parametrize("field", ["depth", "rejection_weight"])
def test_a_head_is_named_by_numbers_only(tmp_path, field):
    """They are part of its folder's name."""
    head = save_head(tmp_path / "head", tiny_model("llama"))
    change(head / "config.json", **{field: "../../x"})
    with pytest.raises(ConfigError, match=f"{field} = '../../x'"):
        load_heads(head)
