"""What is a second pass over a Spec-Drafter's block worth, and what its previous-token features?

    python benchmarks/second_pass.py --target MODEL --drafter DRAFTER --data sentences.txt

Mask-predict (Ghazvininejad et al. 2019) on a draft: tokens of the first pass that are at least as
likely as a threshold are fed in place of their masks, and the other slots are predicted once more,
knowing them. No second pass where none is kept or none is left. Decodes greedily, interleaved: the
drafter as it was trained, without previous-token features, and with a second pass at each
threshold. Output is the target's own in all cases.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from drafttrain.build.method import Method
from drafttrain.commands.shell import quiet_libraries
from drafttrain.config.commands import EvalConfig
from drafttrain.config.reading import load_settings
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.decoding.drafters.block import BlockDrafter, BlockSession
from drafttrain.decoding.drafters.slots import slots_to_draft
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.roles import Randomness, StopPolicy
from drafttrain.decoding.shared import Call, Steps, arg_max_of_each
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.types import Proposal, Sampling, Source
from drafttrain.decoding.verifiers import GreedyMatch
from drafttrain.evaluation.bootstrap import Estimate, Ratio, draw_resamples, estimate_ratio
from drafttrain.evaluation.environment import describe_environment
from drafttrain.evaluation.metrics import count_positions, count_rounds, identical
from drafttrain.evaluation.options import EvaluationOptions
from drafttrain.evaluation.prompts import read_prompts
from drafttrain.evaluation.report import write_text
from drafttrain.evaluation.runner import Decoded, make_jobs, run_interleaved
from drafttrain.models.drafters import load_drafter, read_drafter_settings
from drafttrain.models.loading import load_target
from drafttrain.models.spec_drafter.model import SpecDrafter

RESAMPLES = 1000


class SecondPass(BlockDrafter):
    """Drafts greedily in two passes."""

    def __init__(self, model: SpecDrafter, threshold: float):
        if model.config.slot_weights == "own":
            raise ValueError(
                "this drafter multiplies masks with weights of their own, so a slot that is told "
                "its token would be read as in no training; give one of drafter.slot_weights=shared"
            )
        super().__init__(model)
        self.threshold = threshold
        """Least probability of a token of the first pass that the second is told."""
        self.blocks = 0
        self.second_passes = 0

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> BlockSession:
        return TwoPasses(self, source, sampling, randomness)


class TwoPasses(BlockSession):
    drafter: SecondPass

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> Steps[Proposal]:
        last = int(tokens[-1])
        hidden, logits = yield from self.slot_rows(tokens, stop.longest)
        first = yield from self._arg_max(hidden, logits, last, stop)
        kept = self.likelihoods(hidden, first, last) >= self.drafter.threshold
        self.drafter.blocks += 1
        fed = kept[:-1] if self.anchored else kept  # a last anchored slot has no row of its own
        if fed.any() and not kept.all():
            self.drafter.second_passes += 1
            hidden = yield from self.read_again(tokens, hidden, first, kept)
            again = yield from self._arg_max(hidden, self.drafter.project(hidden), last, stop)
            first = torch.where(kept, first, again)
        return Proposal.chain(first, hidden=hidden)

    def _arg_max(
        self, hidden: Tensor, logits: Tensor, last: int, stop: StopPolicy
    ) -> Steps[Tensor]:
        count = slots_to_draft(stop, logits, hidden)
        hidden, logits = hidden[:count], logits[:count]
        if self.link is None:
            drafted = yield Call(arg_max_of_each, logits)
        else:
            drafted = yield Call(self.link.chains, (hidden, logits, last))
        return torch.tensor(drafted)

    def likelihoods(self, hidden: Tensor, drafted: Tensor, last: int) -> Tensor:
        """Probability of each drafted token after the one before it. Shapes: -> [K]."""
        previous = torch.cat((drafted.new_tensor([last]), drafted[:-1])).to(self.device)
        probs = self.model.logits(hidden, previous).softmax(-1)
        return probs.gather(-1, drafted[:, None].to(self.device))[:, 0].cpu()

    def read_again(
        self, tokens: Tensor, hidden: Tensor, drafted: Tensor, kept: Tensor
    ) -> Steps[Tensor]:
        """States of the slots, with the kept tokens in their masks' place. Shapes: -> [K, D]."""
        own = slice(None, -1) if self.anchored else slice(None)
        slot_ids = torch.where(kept, drafted, self.model.config.mask_id)[own].tolist()
        asked = (self.state, self.prefix_of(tokens), slot_ids, self.said)
        again, _ = yield Call(self.drafter.slots_all, asked)
        return torch.cat((hidden[:1], again[1:])) if self.anchored else again


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse_arguments(arguments)
    torch.set_num_threads(given.threads)
    quiet_libraries()
    config = settings(given)
    rows = load_inputs(config.data, "data")
    target = load_target(config.target)
    model = CachedModel(target.model)
    prompts, _ = read_prompts(target, model, rows)
    methods = make_methods(given, target)
    options = EvaluationOptions(
        max_new_tokens=given.max_new_tokens, baselines=(), repeats=given.repeats
    )
    jobs = make_jobs(target, model, methods, prompts, options)
    runs = run_interleaved(jobs, len(prompts), options, model.device)
    figures = [summarise(run, runs[0], runs[1]) for run in runs[1:]]
    print(as_table(figures))
    if given.out is not None:
        found = {"environment": describe_environment().model_dump(), "methods": figures}
        write_text(given.out, json.dumps(found, indent=1) + "\n")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="encoder-decoder target")
    parser.add_argument("--drafter", type=Path, required=True, help="trained Spec-Drafter")
    parser.add_argument("--data", required=True, help="inputs")
    parser.add_argument("--skip", type=int, default=0, help="inputs left out at the start")
    parser.add_argument("--prompts", type=int, help="most inputs decoded; default: all there are")
    parser.add_argument("--k", type=int, help="draft length; default: the trained one")
    parser.add_argument(
        "--thresholds",
        type=lambda text: [float(part) for part in text.split(",")],
        default=[0.3, 0.5, 0.7, 0.9],
        help="least probability of a kept token",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--out", type=Path, help="JSON file of all figures")
    return parser.parse_args(arguments)


def settings(given: argparse.Namespace) -> EvalConfig:
    """Raises ConfigError for wrong paths."""
    limit = [] if given.prompts is None else [f"data.limit={given.prompts}"]
    values = [
        f"target.path={given.target}",
        f"data.path={given.data}",
        f"data.skip={given.skip}",
        f"decode.drafter={given.drafter}",
        *limit,
    ]
    return load_settings(EvalConfig, None, values)


def make_methods(given: argparse.Namespace, target) -> list[Method]:
    """As trained first; without previous-token features where it has them; then each threshold."""
    shape = read_drafter_settings(str(given.drafter))
    trained = load_drafter(given.drafter, shape, target)
    if trained.config.prefix_attention == "bidirectional":
        raise SystemExit(
            "error: a prefix that sees its block keeps no cache, so a second pass over the block "
            "alone is not the drafter's own; give a drafter with a causal prefix"
        )
    drafters = {"as trained": BlockDrafter(trained)}
    if trained.config.previous_token_rank:
        alone = load_drafter(given.drafter, shape, target)
        alone.config = copy.copy(trained.config)
        alone.config.previous_token_rank = 0
        drafters["no previous token"] = BlockDrafter(alone)
    for threshold in given.thresholds:
        drafters[f"second pass, {threshold:g}"] = SecondPass(trained, threshold)
    k = given.k or trained.config.k
    return [
        Method(drafter, FixedLength(k), GreedyMatch(), label=label)
        for label, drafter in drafters.items()
    ]


def summarise(run: Decoded, plain: Decoded, trained: Decoded) -> dict:
    """Means with intervals over inputs; times compared are of the same inputs, interleaved."""
    counts, positions = count_rounds(run.outputs), count_positions(run.outputs)
    resamples = draw_resamples(len(run.outputs), RESAMPLES)
    rounds = [round for output in run.outputs for round in output.rounds if round.drafted]
    drafter = run.method.drafter
    share = drafter.second_passes / drafter.blocks if isinstance(drafter, SecondPass) else 0.0
    return {
        "name": run.name,
        "mean_acceptance_length": vars(
            estimate_ratio(Ratio(counts.tokens, counts.rounds), resamples)
        ),
        "accepted": (positions.accepted.sum(0) / positions.reached.sum(0).clip(min=1)).tolist(),
        "second_passes_per_round": share,
        "draft_ms": 1e3 * float(np.median([round.draft_seconds for round in rounds])),
        "verify_ms": 1e3 * float(np.median([round.target_seconds for round in rounds])),
        "speedup": vars(speed_over(plain, run)),
        "speed_as_trained": vars(speed_over(trained, run)),
        "identical": float(identical(run.outputs, plain.outputs).mean()),
    }


def speed_over(other: Decoded, run: Decoded) -> Estimate:
    resamples = draw_resamples(len(run.outputs), RESAMPLES)
    found = estimate_ratio(Ratio(other.median_seconds, run.median_seconds), resamples)
    assert found is not None
    return found


def as_table(figures: Sequence[dict]) -> str:
    lines = [
        "| drafts | mean acceptance length | accepted at 1 2 3 4 5 | second passes a round "
        "| draft ms | verify ms | over plain | over as trained | same output |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for found in figures:
        cells = [
            found["name"],
            interval(found["mean_acceptance_length"]),
            " ".join(f"{share:.2f}".lstrip("0") for share in found["accepted"][:5]),
            f"{found['second_passes_per_round']:.2f}",
            f"{found['draft_ms']:.2f}",
            f"{found['verify_ms']:.2f}",
            interval(found["speedup"]) + "×",
            interval(found["speed_as_trained"]) + "×",
            f"{found['identical']:.0%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def interval(found: dict) -> str:
    return f"{found['value']:.2f} ({found['low']:.2f}–{found['high']:.2f})"


if __name__ == "__main__":
    main()
