"""Transformers' decoding methods, measured as baselines."""

import pytest

from drafttrain.config.base import ConfigError
from drafttrain.decoding.verifiers import SpecVerification
from drafttrain.evaluation import runner
from drafttrain.evaluation.evaluate import evaluate
from drafttrain.evaluation.plan import check_assisted
from drafttrain.evaluation.prompts import read_prompts
from drafttrain.evaluation.runner import make_jobs, steady_assistant
from tests.evaluation.scripted import chain, loaded, options, rows
from tests.tiny_models import CAUSAL_FAMILIES, EOS, tiny_model
from tests.tiny_targets import save_target

PROMPTS = ["w5 w6 w7 w8", "w9 w3 w30", "w12 w12 w20 w33 w4", "w39 w8"]
OPTIONS = options(repeats=1, warmup=0)
ASSISTED = options(baselines=("assisted",))


def test_a_steady_assistant_shares_the_weights_and_leaves_the_drafters_settings_alone():
    model = tiny_model("llama")
    model.generation_config.update(num_assistant_tokens=7, assistant_confidence_threshold=0.3)
    assistant = steady_assistant(model, 3)
    own = assistant.generation_config
    assert (own.num_assistant_tokens, own.num_assistant_tokens_schedule) == (3, "constant")
    assert own.assistant_confidence_threshold == 0.0
    assert model.generation_config.num_assistant_tokens == 7
    assert model.generation_config.assistant_confidence_threshold == 0.3
    assert assistant.lm_head.weight is model.lm_head.weight


def test_each_drafter_and_draft_length_assists_once():
    target = loaded(tiny_model("llama"))
    one, other = tiny_model("llama", seed=5), tiny_model("llama", seed=6)
    lossy = chain(one, 3, SpecVerification(3, 1.0))
    methods = [chain(one, 3), lossy, chain(one, 5), chain(other, 3, label="other")]
    jobs = [job for job in make_jobs(target, methods, ASSISTED) if job.method is None]
    assert [job.name for job in jobs] == [
        "assisted causal k=3, constant, confidence 0",
        "assisted causal k=5, constant, confidence 0",
        "assisted other k=3, constant, confidence 0",
    ]


def test_assisted_generation_with_another_number_of_rows_is_refused(tmp_path):
    target, padded = tiny_model("llama").config, str(tmp_path)
    tiny_model("llama", vocab_size=48).save_pretrained(padded)
    check_assisted([str(save_target(tiny_model("qwen2"), tmp_path / "small"))], target)
    with pytest.raises(ConfigError, match="'assisted', which takes .* the target's vocabulary"):
        check_assisted(["max-gram", padded], target)


@pytest.mark.parametrize(
    ("family", "pad"), [*((family, None) for family in CAUSAL_FAMILIES), ("llama", EOS)]
)
def test_plain_drafted_and_generated_outputs_agree_without_a_warning(
    family, pad, caplog, monkeypatch
):
    monkeypatch.setattr(runner, "BEAMS", 2)  # five beams would include padding with so few tokens
    model = tiny_model(family)
    model.generation_config.update(pad_token_id=pad, max_length=30)
    model.generation_config.eos_token_id = [EOS, 17]
    target, methods = loaded(model), [chain(tiny_model("qwen2", seed=5))]
    report = evaluate(target, methods, rows(PROMPTS), OPTIONS).report
    for name in ("plain", "causal k=3 greedy"):
        assert all(parity.identical == parity.compared == 4 for parity in report.run(name).parity)
    assert "transformers" not in {record.name.split(".")[0] for record in caplog.records}


def test_prompts_that_leave_no_position_are_set_aside_by_number():
    target = loaded(tiny_model("llama"))
    texts = [" ", "w5 w6", " ".join(["w5"] * 65), " ".join(["w5"] * 64)]
    prompts, skipped = read_prompts(target, rows(texts))
    assert [prompt.row for prompt in prompts] == [11, 13]
    assert [(row.row, row.reason) for row in skipped] == [
        (10, "empty"),
        (12, "65 tokens where the target takes 64"),
    ]
    assert prompts[0].source.prefix.tolist() == [5, 6]  # no EOS: the model continues the text
    assert target.model.max_new_tokens(prompts[1].source, 100) == 1
