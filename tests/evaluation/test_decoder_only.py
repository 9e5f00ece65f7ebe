"""Evaluation of decoder-only targets: prompts, the `generate` baseline, gaps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from datasets import Dataset

from drafttrain.build.method import Method
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Sampling
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling
from drafttrain.evaluation.evaluate import evaluate
from drafttrain.evaluation.prompts import EvaluationOptions, read_prompts
from drafttrain.evaluation.quality import top_two
from tests.evaluation.scripted import loaded
from tests.tiny_models import CAUSAL_FAMILIES, EOS, tiny_model

PROMPTS = ["w5 w6 w7 w8", "w9 w3 w30", "w12 w12 w20 w33 w4", "w39 w8"]
OPTIONS = EvaluationOptions(max_new_tokens=12, num_beams=2, repeats=1, warmup=0, bootstrap=20)


def rows(texts: list[str]) -> Dataset:
    count = len(texts)
    return Dataset.from_dict({"row": range(count), "source": texts, "reference": [None] * count})


def causal(seed: int, sampling: Sampling) -> Method:
    drafter = CausalDrafter(CachedModel(tiny_model("qwen2", seed=seed)))
    return Method(
        drafter, FixedLength(3), GreedyMatch() if sampling.greedy else RejectionSampling()
    )


@pytest.mark.parametrize("pad", [None, EOS])
@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_plain_drafted_and_generated_outputs_agree_without_a_warning(family, pad, caplog):
    target = loaded(tiny_model(family))
    target.model.generation_config.update(pad_token_id=pad, max_length=30)
    target.model.generation_config.eos_token_id = [EOS, 17]
    methods = [causal(5, OPTIONS.sampling)]
    report = evaluate(
        target, CachedModel(target.model), methods, rows(PROMPTS), OPTIONS, "prompts"
    ).report
    for name in ("plain", "causal k=3 greedy"):
        assert all(parity.identical == parity.compared == 4 for parity in report.run(name).parity)
    assert "transformers" not in {record.name.split(".")[0] for record in caplog.records}


def test_sampling_runs_with_its_own_baseline():
    target = loaded(tiny_model("qwen2"))
    options = replace(OPTIONS, sampling=Sampling(temperature=1.0, top_k=8), baselines=("generate",))
    methods = [causal(5, options.sampling)]
    report = evaluate(
        target, CachedModel(target.model), methods, rows(PROMPTS), options, "prompts"
    ).report
    assert [run.name for run in report.runs] == ["plain", "causal k=3 rejection", "generate"]


def test_prompts_that_leave_no_position_are_set_aside_by_number():
    target = loaded(tiny_model("llama"))
    model = CachedModel(target.model)
    texts = [" ", "w5 w6", " ".join(["w5"] * 65), " ".join(["w5"] * 64)]
    prompts, skipped = read_prompts(target, model, rows(texts))
    assert [prompt.row for prompt in prompts] == [1, 3]
    assert [(row.row, row.reason) for row in skipped] == [
        (0, "the source is empty"),
        (2, "65 source tokens, the target takes 64"),
    ]
    assert prompts[0].source.prefix.tolist() == [5, 6]  # no EOS: the text goes on
    assert model.max_new_tokens(prompts[1].source, 100) == 1


def test_the_gap_is_that_of_the_row_after_prompt_and_output():
    target = loaded(tiny_model("gpt2"))
    model = CachedModel(target.model)
    [prompt], _ = read_prompts(target, model, rows(["w5 w6 w7"]))
    with torch.inference_mode():
        logits = target.model(torch.tensor([[5, 6, 7, 9, 11]])).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    assert top_two(model, prompt.source, [9, 11], 12) == pytest.approx((first, second), 1e-9)
