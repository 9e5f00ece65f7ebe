"""Exports: which files they contain, how they load, and that a failed export leaves nothing."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import ExportConfig
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.policy import Policy, read_policy
from drafttrain.data.shards.writing import only_writer, renamed_when_whole
from drafttrain.export import folder as export_folder
from drafttrain.export import verify as checks
from drafttrain.export.folder import check_name, older_rope_names, write_parts
from drafttrain.export.parts import load_parts
from drafttrain.export.verify import Check, compare, gap_at_difference, same_numbers, verify
from drafttrain.models.acceptance_head import load_heads
from drafttrain.models.drafters import load_drafter, read_drafter_settings
from drafttrain.models.identity import hash_weights
from drafttrain.training.run_folder import save_final
from tests.comparing import close, same_weights
from tests.export import pairs
from tests.export.pairs import FEW, Change, export_to, make_head, noisy_copy, save_drafter
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target, tiny_tokenizer

PROMPT = torch.tensor([[3, 9, 14, 22]])


def test_an_export_has_drafter_head_policy_code_and_card(exported):
    names = {str(file.relative_to(exported)) for file in exported.rglob("*") if file.is_file()}
    of_head = {"acceptance_head/config.json", "acceptance_head/model.safetensors"}
    code = {"custom_generate/generate.py", "custom_generate/requirements.txt"}
    own = {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json"}
    assert names >= own | of_head | code | {"policy.json", "README.md"}
    assert (exported / "custom_generate/requirements.txt").read_text().startswith("drafttrain>=")
    written = read_policy(exported / "policy.json")
    assert written == Policy(stop="head", h=0.7, max_draft=20, head="D1-w6", drafter="llama")


def test_drafter_head_and_tokenizer_are_those_that_went_in(exported, drafter):
    original = noisy_copy("llama")
    reloaded = AutoModelForCausalLM.from_pretrained(exported, use_safetensors=True).eval()
    assert same_weights(reloaded, original)
    close(reloaded(PROMPT).logits, original(PROMPT).logits, 1e-12)
    [head] = load_heads(exported / "acceptance_head").values()
    assert same_weights(head, make_head(original))
    files = (load_file(folder / "model.safetensors") for folder in (exported, drafter))
    assert next(files).keys() == next(files).keys()  # no files of the head
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert tokenizer("w9 w14").input_ids == [9, 14, 1]


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_rotary_settings_are_also_named_as_in_transformers_4():
    own = {"rope_theta": 5e5, "partial_rotary_factor": 0.5}
    assert older_rope_names({"rope_parameters": LLAMA3 | own}) == own | {"rope_scaling": LLAMA3}
    plain = {"rope_type": "default", "rope_theta": 1e5}
    assert older_rope_names({"rope_parameters": plain}) == {"rope_theta": 1e5}
    for several in ({"full_attention": {"rope_theta": 5.0}}, None):
        assert older_rope_names({"rope_parameters": several}) == {}
    assert older_rope_names({"rope_parameters": {"rope_theta": 5.0}, "rope_theta": 6.0}) == {}


def test_an_export_states_the_rotary_base_under_both_names(tmp_path, exported):
    config = json.loads((exported / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    LlamaConfig(rope_parameters=LLAMA3 | {"rope_theta": 5e5}).save_pretrained(tmp_path)
    before, file = AutoConfig.from_pretrained(tmp_path).to_dict(), tmp_path / "config.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | older_rope_names(written)))
    assert json.loads(file.read_text())["rope_scaling"] == LLAMA3
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == before


def test_transformers_own_assisted_generation_loads_the_plain_drafter(tmp_path, drafter, head):
    out = export_to(tmp_path / "out", drafter=str(drafter), head=head, num_assistant_tokens=4)
    assistant = AutoModelForCausalLM.from_pretrained(out).eval()
    settings = assistant.generation_config
    assert settings.num_assistant_tokens == 4
    assert settings.num_assistant_tokens_schedule == "constant"
    assert settings.assistant_confidence_threshold == 0.4
    target = tiny_model("llama")
    wanted = {"max_new_tokens": 24, "do_sample": False}
    plain = target.generate(PROMPT, **wanted)
    assert torch.equal(target.generate(PROMPT, assistant_model=assistant, **wanted), plain)


def test_a_policy_of_fixed_length_turns_transformers_own_stop_off(tmp_path, drafter, capsys):
    """Of a policy with a faster tree, the best chain is exported."""
    policy, method = tmp_path / "policy.json", {"tree": {"kind": "opt-tree", "nodes": 8}}
    chain = {"stop": "fixed", "k": 6, "verifier": {"kind": "auto"}}
    batches = {"4": {**chain, "method": method}}
    faster = {**chain, "method": method, "batches": batches, "regret": 0.02}
    policy.write_text(json.dumps(faster))
    out = export_to(tmp_path / "out", drafter=str(drafter), policy=policy)
    settings = json.loads((out / "generation_config.json").read_text())
    assert settings["num_assistant_tokens"] == 6
    assert settings["assistant_confidence_threshold"] == 0.0
    written = json.loads((out / "policy.json").read_text())
    assert written == {"drafter": "llama", **chain, "batches": {"4": chain}}
    [line] = [one for one in capsys.readouterr().err.splitlines() if "tree or cascade" in one]
    assert str(policy) in line and "best chain" in line


def test_a_run_of_heads_is_exported_with_the_one_its_policy_chose(tmp_path, drafter):
    final = tmp_path / "run" / "final"
    model = noisy_copy("llama")
    for depth in (0, 2):
        pairs.save_head(final / f"D{depth}-w6", model, depth=depth)
    policy = {"stop": "head", "head": "D2-w6", "h": 0.4, "max_draft": 12}
    (final / "policy.json").write_text(json.dumps(policy))
    out = export_to(tmp_path / "out", drafter=str(drafter), head=tmp_path / "run")
    [exported] = load_heads(out / "acceptance_head").values()
    assert exported.config.depth == 2
    assert read_policy(out / "policy.json") == Policy(**policy, drafter="llama")


def test_other_programs_draft_what_our_engine_drafts_of_a_few_tokens(tmp_path, capsys):
    few = list(range(1, 12))
    model = noisy_copy("llama", 1.0)
    model.config.draftable_tokens = few
    save_target(model, tmp_path / "drafter")
    head = pairs.save_head(tmp_path / "D1-w6", model)
    out = export_to(tmp_path / "out", drafter=str(tmp_path / "drafter"), head=head)
    assert "29 tokens that it does not draft" in capsys.readouterr().err
    theirs = AutoModelForCausalLM.from_pretrained(out)
    [loaded] = load_heads(out / "acceptance_head").values()
    assert loaded.config.drafter["weights_sha256"] == hash_weights(theirs)
    ids = torch.arange(3, 35).view(4, 8)
    ours = model(ids).logits
    assert (ours.argmax(-1) > 11).any()
    assert torch.equal(theirs(ids).logits.argmax(-1), 1 + ours[..., 1:12].argmax(-1))


def test_a_head_trained_in_float32_fits_a_drafter_stored_in_half_precision(tmp_path):
    drafter = save_drafter(tmp_path / "half", dtype=torch.float16)
    in_float32 = load_drafter(drafter, read_drafter_settings(str(drafter))).float()
    head = pairs.save_head(tmp_path / "head", in_float32)
    out = export_to(tmp_path / "out", drafter=str(drafter), head=head)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"


def chosen(policy: str) -> Change:
    """Returns a change of the given policy."""

    def settings(root: Path) -> dict[str, object]:
        (root / "policy.json").write_text(policy)
        return {"policy": root / "policy.json"}

    return settings


def of_head(**changes: object) -> Change:
    return lambda root: {"head": pairs.save_head(root / "head", noisy_copy("llama"), **changes)}


ANOTHER = {"path": "other", "weights_sha256": "ab" * 32}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (of_head(drafter=ANOTHER), "'other' with other weights"),
        (of_head(drafter=None), "does not say which drafter"),
        (of_head(hidden_size=24), "reads states of size 24, but the drafter's have size 16"),
        (chosen('{"stop": "head", "head": "D3-w6", "h": 0.7}'), "'D3-w6', but --head is 'D1-w6'"),
        (lambda root: chosen('{"stop": "head", "h": 0.7}')(root) | {"head": None}, "with --head"),
        (chosen("{}"), "stop: Field required"),
        (chosen('{"stop": "head", "h": 1.5}'), "h = 1.5: Input should be less than 1"),
        (chosen('{"stop": "fixed"}'), "stop is 'fixed' but there is no k; add k"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(tmp_path, drafter, head, change, says):
    settings = {"drafter": str(drafter), "head": head} | change(tmp_path)
    with pytest.raises(ConfigError, match=says):
        export_to(tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_nothing_in_an_export_says_where_it_or_its_models_lie(tmp_path):
    private = tmp_path / "my folder"
    model = tiny_model("marian").float()
    target = save_target(model, private / "target")
    spec = pairs.save_spec_drafter(private / "spec", model, target)
    drafter = save_drafter(private / "drafter")
    recorded = {"path": str(drafter), "weights_sha256": hash_weights(noisy_copy("llama"))}
    head = pairs.save_head(private / "head", noisy_copy("llama"), drafter=recorded, target=recorded)
    for given in ({"drafter": str(spec)}, {"drafter": str(drafter), "head": head}):
        out = export_to(private / "out", **given, target={"path": str(target)}, force=True)
        for file in out.rglob("*"):
            if file.is_file():
                assert str(private).encode() not in file.read_bytes(), file
    assert "`target` was a local folder" in (out / "README.md").read_text()


@pytest.mark.parametrize("mask", [0o002, 0o077])
def test_files_have_the_mode_of_the_umask(tmp_path, drafter, head, mask):
    before = os.umask(mask)
    try:
        export_to(tmp_path / "out", drafter=str(drafter), head=head)
        save_final(tmp_path / "run", noisy_copy("llama"), tiny_tokenizer())
        with renamed_when_whole(tmp_path / "cache.safetensors") as temporary:
            save_file({"states": torch.zeros(1)}, temporary)
    finally:
        os.umask(before)
    modes = {file.stat().st_mode & 0o777 for file in tmp_path.rglob("*") if file.is_file()}
    assert modes == {0o666 & ~mask}


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.6}, {"top_p": 0.9, "top_k": 20}, {"early_stopping": True}],
    ids=str,
)
def test_generation_settings_that_transformers_refuses_to_write_are_left_out(
    tmp_path, capsys, settings
):
    drafter, ids = save_drafter(tmp_path / "drafter"), {"eos_token_id": 1, "pad_token_id": 0}
    (drafter / "generation_config.json").write_text(json.dumps(ids | settings))
    out = export_to(tmp_path / "out", drafter=str(drafter))
    written = json.loads((out / "generation_config.json").read_text())
    assert written.items() >= {**ids, "num_assistant_tokens": 4}.items()
    assert not written.keys() & settings.keys()
    save_final(tmp_path, AutoModelForCausalLM.from_pretrained(drafter), tiny_tokenizer())
    assert capsys.readouterr().err.count(next(iter(settings))) == 2


@pytest.mark.parametrize("trap", ["my-eagle-drafter", "Eagle3", "dflash", "a-dspark-b"])
def test_names_that_mislead_vllm_are_refused(trap):
    with pytest.raises(ConfigError, match="choose another name"):
        check_name(trap, "out")


def test_only_an_earlier_export_is_replaced_and_only_on_request(tmp_path, drafter, head):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="exists and is no earlier export"):
        export_to(out, drafter=str(drafter), force=True)
    assert (out / "thesis.txt").is_file()
    (out / "thesis.txt").unlink()
    export_to(out, drafter=str(drafter), head=head)
    export_to(out, drafter=str(drafter), force=True)
    assert not (out / "acceptance_head").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_broken_write_leaves_nothing_and_keeps_the_earlier_export(tmp_path, drafter, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    out = tmp_path / "exports" / "mine"
    monkeypatch.setattr(export_folder, "verify", fail)
    with pytest.raises(OSError, match="could not be written"):
        export_to(out, drafter=str(drafter))
    assert list(out.parent.iterdir()) == []
    monkeypatch.undo()
    export_to(out, drafter=str(drafter))
    before = (out / "README.md").read_text()
    monkeypatch.setattr(export_folder, "verify", fail)
    with pytest.raises(OSError):
        export_to(out, drafter=str(drafter), num_assistant_tokens=3, force=True)
    assert (out / "README.md").read_text() == before
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda at: tiny_model("llama").save_pretrained(at), "weights changed"),
        (
            lambda at: make_head(noisy_copy("llama"), 2).save_pretrained(at / "acceptance_head"),
            "acceptance head changed",
        ),
        (lambda at: chosen('{"stop": "fixed", "k": 2}')(at), "policy.json changed"),
    ],
    ids=["weights", "head", "policy"],
)
def test_verification_finds_changed_files(tmp_path, drafter, head, spoil, says):
    out = tmp_path / "out"
    parts = load_parts(ExportConfig(out=out, drafter=str(drafter), head=head))
    write_parts(out, parts)
    assert verify(out, parts, Check(FEW), compare).drafted == len(FEW)
    if says == "weights changed":  # random inputs, as none are given
        assert verify(out, parts, Check(), compare).drafted == checks.INPUTS > 0
    spoil(out)
    with pytest.raises(ValueError, match=says):
        verify(out, parts, Check(FEW), compare)


def test_an_export_repairs_what_a_killed_one_left(tmp_path, drafter):
    out = export_to(tmp_path / "out", drafter=str(drafter))
    (tmp_path / ".out.part" / "out").mkdir(parents=True)
    out.rename(tmp_path / ".out.old")  # killed between its two renames
    with pytest.raises(ConfigError, match="add --force"):
        export_to(out, drafter=str(drafter))
    assert (out / "model.safetensors").is_file()
    with only_writer(tmp_path, "out", ".out.exporting.lock"):
        with pytest.raises(ConfigError, match="another process is writing"):
            export_to(out, drafter=str(drafter), force=True)
    export_to(out, drafter=str(drafter), force=True)
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_outputs_of_the_target_are_compared_and_a_wrong_one_is_noticed(
    tmp_path, drafter, own_modules
):
    target = save_target(tiny_model("llama").float(), tmp_path / "target")
    parts = load_parts(ExportConfig(out=tmp_path / "out", drafter=str(drafter)))
    check = Check(inputs=[[4, 9], [5, 7, 11]], target=TargetConfig(path=str(target)))
    out = tmp_path / "out"
    write_parts(out, parts)
    found = verify(out, parts, check, compare)
    assert (found.drafted, found.decoded, found.ties) == (2, 2, 0)
    code = out / "custom_generate" / "generate.py"
    code.write_text("def generate(model, input_ids, **_):\n    return input_ids + 1\n")
    with pytest.raises(ValueError, match="different outputs for input 0"):
        verify(out, parts, check, compare)


def test_numbers_may_differ_by_rounding_only():
    numbers = torch.tensor([1.0, -100.0])
    assert same_numbers(numbers + torch.tensor([1e-4, 0.0]), numbers)
    assert not same_numbers(numbers + torch.tensor([1e-3, 0.0]), numbers)
    assert not same_numbers(numbers.double(), numbers)
    assert not same_numbers(numbers[:1], numbers)


def test_the_gap_is_taken_where_outputs_part():
    target = tiny_model("llama")
    source, own = torch.tensor([[3, 9]]), {"output_logits": True, "return_dict_in_generate": True}
    plain = target.generate(source, max_new_tokens=4, do_sample=False, **own)
    other = plain.sequences[0].clone()
    other[3] = (other[3] + 1) % 40
    best, second = target(plain.sequences[:, :3]).logits[0, -1].float().topk(2).values.tolist()
    assert gap_at_difference(plain, other) == pytest.approx(best - second)
    other[0] += 1
    assert gap_at_difference(plain, other) == math.inf
    assert gap_at_difference(plain, plain.sequences[0][:4]) == math.inf
