"""Hand-written reports with several batch sizes."""

from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.report import DataFacts, Environment, Report, Run, TargetFacts, Tried

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


def tried(value: float = 1.0, high: float = 1.1, **changes: object) -> Tried:
    """Returns a candidate of `tune`. value: its speed relative to the best, at most `high`."""
    facts = {"discard_rate": 0.1, "verification_rate": 0.5, "stays": True}
    facts["tokens_per_second"] = estimate(100 * value)
    facts["against_best"] = Estimate(value, value - 0.1, high)
    return Tried(**facts | changes)


def run(name: str, k: int | None = None, **changes: object) -> Run:
    facts = {"kind": "plain", "method": "plain", "drafter": "none"}
    if k is not None:
        facts = {"kind": "method", "method": "chain", "drafter": "causal", "settings": {"k": k}}
    facts |= {"name": name, "verifier": "greedy", "sampling": {}, "lossless": True}
    facts["metrics"] = dict.fromkeys(("mean_acceptance_length", "speedup"), estimate(1.5))
    return Run(**facts | {"totals": {"prompts": 40}} | changes)


def batch_run(name: str, size: int, figures: tuple[float, ...], **changes: object) -> Run:
    """figures: tokens per second, ms per token, speedup and, optionally, share of equal outputs."""
    names = ("tokens_per_second", "ms_per_token", "speedup", "identical")
    metrics = {name: estimate(value) for name, value in zip(names, figures, strict=False)}
    facts = {"batch_size": size, "metrics": metrics, "memory_bytes": size * 2_500_000}
    return run(name, **facts | changes)


def batched_report() -> Report:
    """Returns a report of plain decoding and two draft lengths at batch sizes 1 and 8, and assisted
    generation at 1."""
    runs = [
        batch_run("plain", 1, (100, 10, 1.0)),
        batch_run("causal k=3 greedy", 1, (150, 6.5, 1.5), k=3),
        batch_run("causal k=9 greedy", 1, (210, 5, 2.1), k=9),
        batch_run("assisted", 1, (90, 11, 0.9), kind="baseline", method="assisted"),
        batch_run("plain", 8, (400, 18, 1.0, 0.95)),
        batch_run("causal k=3 greedy", 8, (480, 16, 1.2), k=3),
        batch_run("causal k=9 greedy", 8, (380, 21, 0.95), k=9),
    ]
    return Report(
        mode="decode",
        target=TargetFacts(path="models/target", parameters=100, dtype="float32", device="cpu"),
        data=DataFacts(path="test.jsonl", prompts=40, references=0),
        environment=ENVIRONMENT,
        options={},
        runs=runs,
    )
