"""Reports of batch sizes with figures written by hand."""

from __future__ import annotations

from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.environment import Environment
from drafttrain.evaluation.report import BatchResult, DataFacts, Report, Run, TargetFacts

ENVIRONMENT = Environment(
    date="2026-11-27T00:00:00+00:00",
    command="drafttrain eval",
    cpu="a CPU",
    cores=2,
    threads=1,
    gpu=None,
    python="3.11.7",
    versions={"torch": "2.11.0", "transformers": "5.15.0"},
    commit=None,
)


def estimate(value: float) -> Estimate:
    return Estimate(value, 0.9 * value, 1.1 * value)


def result(size: int, speed: float, delay: float, speedup: float, differing: int = 0):
    values = {"tokens_per_second": speed, "ms_per_token": delay, "speedup": speedup}
    metrics = {name: estimate(value) for name, value in values.items()}
    return BatchResult(
        batch_size=size, metrics=metrics, differing=differing, memory_bytes=size * 2_500_000
    )


def run(name: str, batches: list[BatchResult], k: int | None = None, **changes: object) -> Run:
    facts = {
        "name": name,
        "kind": "plain" if k is None else "method",
        "method": "plain" if k is None else "chain",
        "sizes": {},
        "drafter": "none" if k is None else "causal",
        "stop": None,
        "verifier": "greedy",
        "sampling": {},
        "lossless": True,
        "settings": {} if k is None else {"k": k},
        "metrics": {name: estimate(1.5) for name in ("mean_acceptance_length", "speedup")},
        "totals": {"prompts": 40},
        "batches": batches,
    }
    return Run(**facts | changes)


def batched_report() -> Report:
    """Two draft lengths beside plain decoding at batch sizes 1 and 8, assisted generation at 1."""
    runs = [
        run("plain", [result(1, 100, 10, 1.0), result(8, 400, 18, 1.0, differing=2)]),
        run("causal k=3 greedy", [result(1, 150, 6.5, 1.5), result(8, 480, 16, 1.2)], k=3),
        run("causal k=9 greedy", [result(1, 210, 5, 2.1), result(8, 380, 21, 0.95)], k=9),
        run("assisted", [result(1, 90, 11, 0.9)], kind="baseline", method="assisted"),
    ]
    return Report(
        mode="decode",
        target=TargetFacts(path="models/target", parameters=100, dtype="float32", device="cpu"),
        data=DataFacts(path="test.jsonl", prompts=40, references=0),
        environment=ENVIRONMENT,
        options={},
        runs=runs,
        memory="resident",
    )
