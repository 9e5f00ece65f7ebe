"""Model cards: real values in every command, measurements with their source, stated limits."""

from dataclasses import replace
from pathlib import Path

import yaml

from drafttrain.config.commands import ExportConfig
from drafttrain.config.policy import Policy
from drafttrain.export.model_card import Measured, describe_policy, front_matter, write_card
from drafttrain.export.parts import load_parts
from drafttrain.export.verify import Verification
from tests.export.pairs import noisy_copy, save_drafter, save_head

MEASURED = Measured(
    table="| method | speed-up |\n| --- | ---: |\n| causal head(0.7) rejection | 1.31× |",
    notes=["intervals over prompts"],
    command="drafttrain eval --drafter d --report report.json",
    data="200 prompts of `test.jsonl`",
    machine="2 cores of a CPU",
    date="2026-11-21",
)


DRAFTED = Verification(drafted=20)


def card_of(
    folder: Path, family: str = "llama", measured: Measured = MEASURED, with_head: bool = True,
    found: Verification = DRAFTED, **given: object,
) -> str:  # fmt: skip
    drafter = save_drafter(folder / "drafter", family)
    if with_head:
        given["head"] = save_head(folder / "head", noisy_copy(family))
    settings = export_of(drafter=str(drafter), **given)
    return write_card(settings, measured, load_parts(settings), found)


def export_of(**given: object) -> ExportConfig:
    common = {"drafter": "d", "out": "exports/mine", "target": {"path": "org/big"}}
    return ExportConfig(**common | given)


def test_a_policy_slower_than_plain_decoding_says_so():
    policy = Policy(stop="fixed", k=1, speculate=False)
    assert describe_policy(policy).startswith(
        "always 1 token per round; plain decoding was as fast"
    )
    assert "plain" not in describe_policy(Policy(stop="fixed", k=2))


def test_commands_for_every_engine_have_real_values(tmp_path):
    text = card_of(tmp_path, num_assistant_tokens=7)
    assert "vllm serve org/big --speculative-config '{" in text
    assert "--speculative-algorithm STANDALONE" in text
    assert "--speculative-draft-model-path exports/mine" in text
    assert "--speculative-num-steps 7 --speculative-eagle-topk 1" in text
    assert "--speculative-num-draft-tokens 8" in text
    assert 'assistant_model=AutoModelForCausalLM.from_pretrained("exports/mine")' in text
    assert 'custom_generate="exports/mine", trust_remote_code=True' in text
    assert "vocabulary 40" in text
    for shown in (MEASURED.table, MEASURED.command, MEASURED.machine, MEASURED.date):
        assert shown in text


def test_a_card_lists_files_by_engine(tmp_path):
    text = card_of(tmp_path)
    assert "| Transformers, `custom_generate` (drafttrain) | yes | yes | yes |" in text
    assert "| Transformers, `assistant_model` only | yes | no | no |" in text
    assert "| vLLM, SGLang, TensorRT-LLM, llama.cpp | yes | no | no |" in text
    seq2seq = card_of(tmp_path / "b", "t5", with_head=False)
    assert "| yes | yes | not included |" in seq2seq and "AutoModelForSeq2SeqLM" in seq2seq
    assert "vLLM" not in seq2seq and "SGLang" not in seq2seq


def test_front_matter_has_only_hub_names(tmp_path):
    on_hub = export_of(license="apache-2.0", training_data="user/data")
    assert yaml.safe_load(front_matter(on_hub, ["acceptance-head"]).to_yaml()) == {
        "library_name": "transformers",
        "license": "apache-2.0",
        "base_model": "org/big",
        "datasets": "user/data",
        "tags": ["speculative-decoding", "drafter", "drafttrain", "acceptance-head"],
    }
    local = export_of(target={"path": str(tmp_path)}, training_data="my own notes")
    text = front_matter(local, []).to_yaml()
    assert "base_model" not in text and "datasets" not in text and "license" not in text


def test_a_card_has_licences_plot_and_verification(tmp_path):
    measured = replace(MEASURED, plot=tmp_path / "any.png")
    checked = Verification(drafted=20, decoded=20, ties=1)
    origin = {"license": "apache-2.0", "training_data": "tickets.jsonl"}
    text = card_of(tmp_path, measured=measured, with_head=False, found=checked, **origin)
    assert "| this drafter |  | apache-2.0 |" in text
    assert "| its target | `org/big` | see its source |" in text
    assert "| its training data | `tickets.jsonl` | see its source |" in text
    assert "![Measured results](report.png)" in text
    assert "for 20 of 20 inputs, `org/big` with custom_generate" in text
    assert "1 of them up to a tie" in text
    unknown = card_of(tmp_path / "b", with_head=False, target=None)
    assert "| this drafter |  | not stated |" in unknown
    assert "| its target | not stated | see its source |" in unknown
    assert "report.png" not in unknown and "plain greedy decoding" not in unknown


def test_a_lossy_verifier_is_named_at_the_top(tmp_path):
    lossy = {"kind": "spec-verification", "beta": 3, "tau": 1.0}
    text = card_of(tmp_path, with_head=False, verifier=lossy)
    warning = "**Lossy in greedy decoding:** a drafted token is accepted if it is among the target"
    assert warning in text and text.index(warning) < text.index("## Measured")
    assert "first choice (SpecDec, Xia et al. 2023)." in text
    assert "Lossy" not in card_of(tmp_path / "b", with_head=False)
    block = card_of(tmp_path / "c", with_head=False, verifier={"kind": "block"})
    assert "greedy match, block above temperature 0: both lossless" in block
