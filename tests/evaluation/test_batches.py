"""Batches give the tokens of batch size 1; groups and their times."""

from dataclasses import replace

import pytest
import torch

from drafttrain.config.decode import SamplingConfig
from drafttrain.decoding.types import Output, Round
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling, SpecVerification
from drafttrain.evaluation import runner
from drafttrain.evaluation.bootstrap import draw_resamples, estimate_all
from drafttrain.evaluation.evaluate import Context, decode_batches, measure
from drafttrain.evaluation.metrics import speed_figures
from drafttrain.evaluation.prompts import read_prompts
from drafttrain.evaluation.runner import Job, make_groups, make_jobs, plain_method, run_interleaved
from tests.evaluation.scripted import chain, loaded, options, rows
from tests.tiny_drafters import noisy
from tests.tiny_models import tiny_model

CPU = torch.device("cpu")
PLAIN = plain_method(SamplingConfig())
TEXTS = [
    "w5 w6 w7 w8", "w9 w3 w30", "w12 w12 w20 w33 w4", "w39 w8", "w7", "w22 w21 w20", "w4 w4",
    "w31 w30 w29 w28 w27 w26 w25",
]  # fmt: skip


@pytest.mark.covered
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", ["llama", "gpt2", "marian", "t5"])
def test_every_job_decodes_the_same_tokens_at_every_batch_size(family, temperature):
    target = loaded(tiny_model(family))
    prompts, _ = read_prompts(target, rows(TEXTS))
    settings = options(temperature, max_new_tokens=8)
    rule = GreedyMatch() if temperature == 0.0 else RejectionSampling()
    method = chain(noisy(target.target.model, family), verifier=rule)
    for job in make_jobs(target, [method], settings):
        if temperature > 0.0 and job.method is None:
            continue  # a batch of `generate` samples from one stream; beam search is greedy
        alone = [job.decode([prompt], 1)[0].tokens for prompt in prompts]
        for size in (3, 8):
            together = job.decode(prompts, size)
            assert [output.tokens for output in together] == alone, (job.name, size)


def test_prompts_near_the_last_position_equal_single_ones_in_batches():
    target = loaded(tiny_model("gpt2"))  # 64 positions, learned
    texts = [" ".join(["w5"] * 60), "w5 w6", " ".join(["w9", "w7"] * 30), "w8"]
    prompts, _ = read_prompts(target, rows(texts))
    for job in make_jobs(target, [], options(max_new_tokens=10)):
        alone = [job.decode([prompt], 1)[0].tokens for prompt in prompts]
        assert [output.tokens for output in job.decode(prompts, 4)] == alone
        assert 1 <= len(alone[0]) <= 5


def test_groups_are_single_prompts_at_batch_size_1_else_four_batches_or_more():
    assert make_groups(3, 1) == [[0], [1], [2]]
    assert make_groups(6, 2) == [[0, 1, 2, 3, 4, 5]]
    groups = make_groups(21, 2)
    assert [len(group) for group in groups] == [11, 10]
    assert sum(groups, []) == list(range(21))


def played(draft: float, target: float) -> Round:
    return Round(0, [], [], [5], draft_seconds=draft, target_seconds=target)


class Script:
    """A job whose outputs have scripted times."""

    def __init__(self, name: str, seconds: list[float], shares: list[float], tokens: list[int]):
        self.name, self.seconds, self.shares, self.tokens = name, seconds, shares, tokens
        self.calls: list[tuple[list[int], int]] = []

    def decode(self, chosen, batch_size: int) -> list[Output]:
        self.calls.append((list(chosen), batch_size))
        outputs = []
        for place in chosen:
            rounds = [played(self.shares[place] / 4, 3 * self.shares[place] / 4)]
            outputs.append(Output([5] * self.tokens[place], rounds, self.seconds[place]))
        return outputs

    def job(self, method=PLAIN) -> Job:
        return Job(self.name, "plain" if self.name == "plain" else "chain", self.decode, method)


def scripted(monkeypatch, group_seconds: dict[str, list[float]]):
    """Scripts the seconds of the groups of each job, in order."""
    left = {name: iter(seconds) for name, seconds in group_seconds.items()}
    order: list[str] = []

    def timed(job, group, batch_size, device):
        order.append(job.name)
        return job.decode(group, batch_size), next(left[job.name])

    monkeypatch.setattr(runner, "_timed", timed)
    return order


def test_latency_is_a_sequences_own_time_and_throughput_that_of_whole_groups(monkeypatch):
    """4 sequences of 10, 20, 10 and 20 tokens in groups of 6 s and 3 s, computed by hand."""
    plain = Script("plain", [2.0, 4.0, 1.0, 2.0], [1.0, 2.0, 1.0, 1.0], [10, 20, 10, 20])
    fast = Script("fast", [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [10, 20, 10, 20])
    order = scripted(monkeypatch, {"plain": [6.0, 3.0], "fast": [2.0, 1.0]})
    monkeypatch.setattr(runner, "make_groups", lambda *_: [[0, 1], [2, 3]])
    jobs, settings = [plain.job(), fast.job()], options(repeats=1, warmup=0)
    decoded = run_interleaved(jobs, range(4), settings, CPU, batch_size=2)
    assert order == ["plain", "fast", "fast", "plain"], "the order rotates from group to group"
    assert plain.calls == [([0, 1], 2), ([2, 3], 2)]
    assert decoded[0].cost_seconds.tolist() == [2.0, 4.0, 1.5, 1.5]
    assert decoded[0].median_seconds.tolist() == [2.0, 4.0, 1.0, 2.0]
    slow, quick = (values_of(run, decoded) for run in decoded)
    assert slow["tokens_per_second"] == pytest.approx(60 / 9.0)
    assert quick["tokens_per_second"] == pytest.approx(60 / 3.0)
    assert quick["speedup"] == pytest.approx(9.0 / 3.0) and slow["speedup"] == 1.0
    assert slow["ms_per_token"] == pytest.approx(150.0)  # median of 200, 200, 100, 100
    assert quick["ms_per_token"] == pytest.approx(75.0)  # median of 100, 50, 100, 50


def values_of(run, decoded) -> dict[str, float]:
    found = estimate_all(speed_figures(run, decoded, sampled=False), draw_resamples(4, 50))
    return {name: estimate.value for name, estimate in found.items()}


def test_the_time_of_a_group_is_the_median_of_its_repeats(monkeypatch):
    plain = Script("plain", [1.0, 1.0], [1.0, 3.0], [10, 10])
    scripted(monkeypatch, {"plain": [8.0, 4.0, 100.0]})
    settings = options(repeats=3, warmup=0)
    [decoded] = run_interleaved([plain.job()], range(2), settings, CPU, batch_size=2)
    assert decoded.cost_seconds.tolist() == [2.0, 6.0]


def test_at_batch_size_1_a_prompt_has_the_time_of_its_calls():
    plain = Script("plain", [9.0, 9.0, 9.0], [1.0, 2.0, 3.0], [10, 10, 10])
    settings = options(repeats=3, warmup=0)
    [decoded] = run_interleaved([plain.job()], range(3), settings, CPU)
    assert decoded.cost_seconds.tolist() == pytest.approx(decoded.median_seconds.tolist())
    assert [chosen for chosen, _ in plain.calls[:3]] == [[0], [1], [2]]


def test_sequences_that_differ_from_batch_size_1_are_counted():
    class Wrong(Script):
        def decode(self, chosen, batch_size: int) -> list[Output]:
            found = super().decode(chosen, batch_size)
            for place, output in zip(chosen, found, strict=True):
                if batch_size > 1 and place in (1, 2):
                    output.tokens[-1] = 6
            return found

    lossy = replace(PLAIN, verifier=SpecVerification(3, 1.0))
    job = Wrong("plain", [1.0] * 4, [1.0] * 4, [3] * 4).job(lossy)
    settings = options(repeats=1, warmup=0, batch_sizes=(1, 2))
    alone, together = decoded = decode_batches([job], range(4), settings, CPU)
    run = measure(Context(None, [], settings, decoded, {}), together, draw_resamples(4, 5))
    assert (run.batch_size, run.metrics["identical"].value) == (2, 0.5)
    assert alone.memory_bytes is None, "only a CUDA device counts its memory"
