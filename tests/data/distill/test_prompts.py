"""Decoder-only targets: prompts and chats as inputs, continuations as outputs."""

import json
from pathlib import Path

import pytest
import torch

from drafttrain.config.base import ConfigError
from drafttrain.data.distill.distill import distill
from drafttrain.data.distill.plan import plan_distillation
from drafttrain.data.shards.outputs import load_distilled
from drafttrain.models.loading import load_target
from tests.data.distill.tiny_distill import changed, rows_of, settings
from tests.tiny_models import BOS, EOS, tiny_model
from tests.tiny_targets import save_target, tiny_tokenizer


@pytest.fixture
def causal_target(tmp_path) -> Path:
    """A folder with a tiny Llama that often generates EOS, and the word tokenizer."""
    model = tiny_model("llama")
    model.generation_config.update(eos_token_id=[EOS, 15, 21, 25], pad_token_id=0)
    return save_target(model, tmp_path / "target")


def test_a_target_that_penalises_repetition_takes_rows_of_one_length(causal_target):
    target = load_target(settings(causal_target).target)
    target.model.generation_config.update(repetition_penalty=1.3)
    config = settings(causal_target, sentences=18)
    distill(config, target)
    wanted = {"do_sample": False, "num_beams": 1, "max_new_tokens": 12}
    for row in load_distilled(config.out):
        ids = torch.tensor([row["source_ids"]])
        expected = target.model.generate(ids, attention_mask=torch.ones_like(ids), **wanted)[0]
        assert row["target_ids"] == expected[ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_prompts_without_room_for_the_output_are_skipped_by_number(family, tmp_path):
    target = save_target(tiny_model(family), tmp_path / "target")
    config = settings(target, sentences=3, sampling={"max_new_tokens": 60})
    Path(config.data.path).write_text("w4 w5\n\nw4 w5 w6 w7\nw4 w5 w6 w7 w8\n")
    counts = distill(config).counts
    assert (counts.ok, counts.skipped) == (2, 2)
    rows = rows_of(config.out)
    assert [row["reason"] for row in rows if row["status"] == "skipped"] == [
        "empty",
        "5 tokens where 60 new ones leave 4 of the target's 64 positions",
    ]


def test_a_decoder_only_target_needs_room_for_a_prompt(causal_target):
    config = settings(causal_target, sampling={"max_new_tokens": 64})
    with pytest.raises(ConfigError, match="64 positions, prompt included; .*max_new_tokens=63"):
        distill(config)
    assert not config.out.exists()


TEMPLATE = "{% for turn in messages %}<s> {{ turn.content }} </s> {% endfor %}<s>"


def test_chats_are_distilled_through_the_template(causal_target):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(causal_target)
    turns = [[{"role": "user", "content": line}] for line in ("w4 w5", " ", "w6")]
    path = causal_target.parent / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    config = settings(causal_target, data={"path": str(path)})
    plan = plan_distillation(config)
    counts = distill(config).counts
    assert (counts.ok, counts.skipped) == (2, 1)
    rows = {row["row"]: row for row in rows_of(config.out)}
    assert rows[0]["source_ids"] == [BOS, 4, 5, EOS, BOS]
    assert rows[1]["reason"] == "no user turn, or one without text"
    assert plan.source_tokens == counts.source_tokens
    plain = settings(causal_target, "plain", sentences=1)
    Path(plain.data.path).write_text("w4 w5\n")
    distill(changed(plain, data={"chat": True}))
    assert rows_of(plain.out)[0] == rows[0]
