"""Model cards: real values in every command, measured numbers with their source, honest reach."""

from __future__ import annotations

from pathlib import Path

from drafttrain.config import ExportConfig, Policy
from drafttrain.export.model_card import Card, Measured, describe_policy, write_card
from drafttrain.export.parts import load_parts
from drafttrain.export.provenance import Provenance
from drafttrain.export.reload import Verification
from tests.export.pairs import SAMPLING, noisy_copy, save_drafter, save_head

MEASURED = Measured(
    table="| method | speed-up |\n| --- | ---: |\n| causal head(0.7) rejection | 1.31× |",
    notes=["intervals over prompts"],
    command="drafttrain eval --drafter d --report report.json",
    data="200 prompts of `test.jsonl`",
    machine="2 cores of a CPU",
    date="2026-11-21",
)


def card_of(tmp_path: Path, family: str = "llama", with_head: bool = True, **settings) -> str:
    drafter = save_drafter(tmp_path / "drafter", family)
    if with_head:
        settings["head"] = save_head(tmp_path / "head", noisy_copy(family))
    config = ExportConfig(drafter=str(drafter), out=tmp_path / "out", **settings)
    card = Card("exports/mine", Provenance(target="org/big"), MEASURED)
    return write_card(card, load_parts(config), Verification(differences=[], drafted=20))


def test_commands_of_every_program_hold_real_values(tmp_path):
    text = card_of(tmp_path, num_assistant_tokens=7)
    vllm = '{"method": "draft_model", "model": "exports/mine", "num_speculative_tokens": 7}'
    assert f"vllm serve org/big --speculative-config '{vllm}'" in text
    assert "--speculative-algorithm STANDALONE" in text
    assert "--speculative-draft-model-path exports/mine" in text
    assert "--speculative-num-steps 7 --speculative-eagle-topk 1" in text
    assert "--speculative-num-draft-tokens 8" in text
    assert 'assistant_model=AutoModelForCausalLM.from_pretrained("exports/mine")' in text
    assert 'custom_generate="exports/mine", trust_remote_code=True' in text
    assert "vocabulary 40" in text


def test_it_says_that_only_drafttrain_uses_the_head(tmp_path):
    text = card_of(tmp_path)
    assert "| Transformers, `custom_generate` (drafttrain) | yes | yes | yes |" in text
    assert "| Transformers, `assistant_model` alone | yes | no | no |" in text
    assert "| vLLM, SGLang | yes | no | no |" in text
    without = card_of(tmp_path / "b", with_head=False)
    assert "| yes | yes | none here |" in without


def test_measured_numbers_stand_beside_their_command_and_machine(tmp_path):
    text = card_of(tmp_path)
    for shown in (MEASURED.table, MEASURED.command, MEASURED.machine, MEASURED.date):
        assert shown in text


def test_encoder_decoder_drafters_name_no_server_that_cannot_load_them(tmp_path):
    text = card_of(tmp_path, "t5")
    assert "AutoModelForSeq2SeqLM" in text
    assert "vLLM" not in text and "SGLang" not in text


def test_the_policy_in_words():
    head = Policy(stop="head", h=0.7, max_draft=20, sampling=SAMPLING)
    assert describe_policy(head) == (
        "stop when the head thinks a rejection likelier than h = 0.7, at most 20 tokens; chosen "
        "for temperature 1, top_k 20, top_p 1"
    )
    assert describe_policy(Policy(stop="fixed", k=6)) == "always 6 tokens a round"
