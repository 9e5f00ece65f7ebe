"""Find a cascade's increments by replay: successive halving, then the neighbours of the best.

Every candidate decodes a few prompts with the production loop and the production cascade, its
models' rows looked up (`RecordedModel`). The better half goes on with twice as many prompts, until
a few are left, which see all. Prompts are taken one after another and each by all candidates that
are left, so that the rows of one prompt only are held in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drafttrain.build.verifiers import AUTO, build_verifier
from drafttrain.config.progress import tracked, tracking
from drafttrain.decoding.drafters.cascade import Level, cascade
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Output, Sampling
from drafttrain.evaluation.bootstrap import Ratio
from drafttrain.evaluation.cascades.candidates import Candidate
from drafttrain.evaluation.cascades.recorded_model import Record, RecordedModel
from drafttrain.evaluation.metrics import count_rounds, walltime_improvement
from drafttrain.evaluation.prompts import Prompt

ReplayPrompt = Callable[[int, Sequence[Candidate]], list[Output]]
"""What each candidate does with prompt number i."""


class CascadeReplay:
    """Decodes prompts with cascades of any increments; a model is called for new rows only.

    In greedy decoding all candidates commit the same tokens, so a further one costs few calls.
    Sampled outputs differ, each with rows of its own. Levels that are no language models, and
    draft nothing but what they compute anew, run as they are.
    """

    def __init__(
        self,
        target: CachedModel,
        levels: Sequence[Level],
        sampling: Sampling,
        max_new_tokens: int,
        seed: int,
    ) -> None:
        self.sampling, self.verifier = sampling, build_verifier(AUTO, sampling)
        self.max_new_tokens, self.seed = max_new_tokens, seed
        strict = sampling.greedy and not target.processors(sampling).change_logits
        self.target = RecordedModel(target, skip_rejected=strict)
        self.levels = [_reviewed_by(level, RecordedModel) for level in levels]
        self.strict_levels = self.levels
        if sampling.greedy:
            self.strict_levels = [
                _reviewed_by(level, RecordedModel.skipping_rejected) for level in self.levels
            ]

    @property
    def models(self) -> dict[str, RecordedModel]:
        """The recorded models: the target, and the levels by name."""
        own = {level.name: level.reviewer for level in self.levels}
        return {"target": self.target} | {
            name: model for name, model in own.items() if isinstance(model, RecordedModel)
        }

    @property
    def records(self) -> dict[str, Record]:
        """What was asked of each model and made."""
        return {name: model.record for name, model in self.models.items()}

    def replay(self, prompt: Prompt, candidates: Sequence[Candidate]) -> list[Output]:
        """What each candidate does with a prompt; rows are forgotten afterwards."""
        outputs = [self._decode(prompt, candidate) for candidate in candidates]
        for model in self.models.values():
            model.forget()
        return outputs

    def _decode(self, prompt: Prompt, candidate: Candidate) -> Output:
        levels = self.levels if candidate.leniency > 1.0 else self.strict_levels
        return Decoder(
            self.target,
            cascade(levels, candidate.increments, candidate.leniency, self.target.eos_ids),
            FixedLength(candidate.longest),
            self.verifier,
            self.sampling,
            lambda _: sequence_randomness(self.seed, prompt.row, self.target.device),
        ).decode_all([prompt.source], self.max_new_tokens)[0]


def _reviewed_by(level: Level, model: Callable[[Any], RecordedModel]) -> Level:
    """The level with what `model` makes of its language model, where it is one."""
    if level.reviewer is None:
        return level
    return replace(level, drafter=CausalDrafter(model(level.reviewer)))


@dataclass(frozen=True)
class Rung:
    """So many candidates saw all prompts up to this number."""

    prompts: int
    candidates: int


@dataclass(frozen=True)
class Searched:
    """What every candidate did with the prompts that it saw, the first ones."""

    outputs: Mapping[Candidate, list[Output]]
    rungs: list[Rung]
    best: Candidate
    """Of the highest SWI among those that saw all prompts."""

    @property
    def finished(self) -> list[Candidate]:
        """Those that saw all prompts."""
        most = max(map(len, self.outputs.values()))
        return [one for one, outputs in self.outputs.items() if len(outputs) == most]


@dataclass(frozen=True)
class Halving:
    """How many prompts the first rung has, and how many candidates are left in the end at least."""

    first: int = 8
    finalists: int = 4


def swi(outputs: Sequence[Output], costs: Mapping[str, float]) -> Ratio:
    """Tokens over calls, in target calls, with these costs of the levels."""
    return walltime_improvement(count_rounds(outputs), costs)


def search(
    candidates: Sequence[Candidate],
    prompts: int,
    replay: ReplayPrompt,
    costs: Mapping[str, float],
    halving: Halving,
    progress: bool = False,
) -> Searched:
    """Successive halving. The first candidate, and the best of each origin that regrets are told
    of, stay to the end."""
    outputs: dict[Candidate, list[Output]] = {candidate: [] for candidate in candidates}
    alive, rungs, seen, upto = list(candidates), [], 0, min(halving.first, prompts)
    with tracking(prompts, "search", "input", shown=progress) as work:
        while True:
            work.set_postfix_str(f"{len(alive)} candidates", refresh=False)
            for prompt in range(seen, upto):
                _collect(outputs, alive, replay(prompt, alive))
                work.update()
            seen = upto
            rungs.append(Rung(seen, len(alive)))
            alive.sort(key=lambda one: -_value(swi(outputs[one], costs)))
            if seen == prompts:
                break
            alive = _survivors(alive, candidates[0], max(halving.finalists, (len(alive) + 1) // 2))
            upto = min(2 * seen, prompts) if len(alive) > halving.finalists + 2 else prompts
    return Searched(outputs, rungs, alive[0])


def search_around(
    searched: Searched,
    near: Sequence[Candidate],
    prompts: int,
    replay: ReplayPrompt,
    costs: Mapping[str, float],
    progress: bool = False,
) -> Searched:
    """Candidates near the best on all prompts too; the best of all that saw them."""
    fresh = [one for one in near if one not in searched.finished]
    outputs = {**searched.outputs, **{one: [] for one in fresh}}
    for prompt in tracked(range(prompts), "around the best", "input", shown=progress):
        _collect(outputs, fresh, replay(prompt, fresh))
    finished = [*searched.finished, *fresh]
    best = max(finished, key=lambda one: _value(swi(outputs[one], costs)))
    return Searched(outputs, [*searched.rungs, Rung(prompts, len(fresh))], best)


def _collect(
    outputs: Mapping[Candidate, list[Output]],
    candidates: Sequence[Candidate],
    found: Sequence[Output],
) -> None:
    for candidate, output in zip(candidates, found, strict=True):
        outputs[candidate].append(output)


def _survivors(ranked: list[Candidate], first: Candidate, count: int) -> list[Candidate]:
    """The best, and the two that regrets are told of: the default, the best first level alone."""
    alone = next((one for one in ranked if one.origin == "first level alone"), first)
    return [one for place, one in enumerate(ranked) if place < count or one in (first, alone)]


def _value(ratio: Ratio) -> float:
    return float(ratio.numerators.sum() / ratio.denominators.sum())
