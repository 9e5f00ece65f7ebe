"""Replay of rejections: what an earlier version of the drafter missed weighs more.

Where decoding is greedy, a round that ends with a rejection ends at a token of the target's own
output at which the drafter held another one likelier, behind a prefix of that output: accepted
drafts are the output's own tokens. The drafter's and the target's rows there are thus rows of the
distilled output, which training computes in any case, and replaying them is weighing them (after
Draft-OPD, arXiv 2605.29343). The loss is

    (1 - share) mean over all learned tokens + share mean over the rejected ones,

which is expected of training on tokens of which a share is drawn from the rejected ones, without
the noise of the draws: nothing is drawn, so that a row's loss depends on nothing but the row. A
trace only says where; what is learned are the distilled rows, of prompts that are trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from drafttrain.config.base import ConfigError
from drafttrain.config.language_recipes import CausalDrafterRecipe, ReplayConfig
from drafttrain.data.batches.examples import Example, Examples
from drafttrain.data.distill.recipe_rows import distillations, row_lengths
from drafttrain.data.rounds import TracedRow, Traces, read_traces
from drafttrain.data.shards.writing import join_processes, renamed_when_whole, say
from drafttrain.data.teacher import TaughtExamples

RECORD = "replay.json"
"""In the folder of a run: what it replays."""
AGREEMENT = 0.5
"""Share of the traced tokens that lie on the target's own outputs, at least. Rounding parts some
outputs from what they were when they were distilled; another target parts most of them early."""


@dataclass(frozen=True)
class Rejections:
    """The rejected tokens among those that are learned."""

    places: Mapping[int, Sequence[int]]
    """Places in the output of each row that has some, by the row's index."""
    rows: int
    """Rows that were traced."""
    tokens: int
    """Learned tokens of all rows, traced or not."""
    share: float
    """Of the loss that is taken at the rejected tokens alone."""

    @property
    def count(self) -> int:
        return sum(map(len, self.places.values()))

    @property
    def weight(self) -> float:
        """Of a rejected token, where others weigh 1: 1 + share / (1 - share) tokens / rejected."""
        return 1.0 + self.share / (1.0 - self.share) * self.tokens / self.count

    def weights(self, row: int, length: int) -> Tensor:
        """Of the tokens of a row's output. Shapes: -> [L]."""
        found = torch.ones(length)
        found[list(self.places.get(row, ()))] = self.weight
        return found


class WeighedExamples(Dataset):
    """Examples whose rejected tokens weigh more."""

    def __init__(self, examples: Examples | TaughtExamples, rejections: Rejections) -> None:
        self._examples, self._rejections = examples, rejections

    def __len__(self) -> int:
        return len(self._examples)

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[Example]:
        return [
            one._replace(weights=self._rejections.weights(one.row, len(one.target_ids)))
            for one in self._examples.__getitems__(keys)
        ]


def check_replay(settings: CausalDrafterRecipe) -> Traces | None:
    """What was traced, once all is checked that is known without weights; None: nothing is asked.

    Raises ConfigError for a file that is missing or broken, or has changed since the run was begun,
    for rounds that are not of greedy decoding, and where the target is not distilled greedily.
    """
    file = settings.replay.path
    if file is None:
        if settings.replay != ReplayConfig():
            raise ConfigError(
                f"replay.share = {settings.replay.share}, replay.method = "
                f"{settings.replay.method!r}: nothing says what is replayed; give replay.path, or "
                "leave replay out"
            )
        return None
    method = distillations(settings)["data"].method
    if method != "greedy":
        raise ConfigError(
            f"replay.path = {str(file)!r} has rounds of greedy decoding, but distill.method = "
            f"{method!r} learns other outputs; give distill.method=greedy, or leave replay out"
        )
    traces = read_traces(settings.replay)
    record = settings.run / RECORD
    if record.is_file() and json.loads(record.read_text())["sha256"] != traces.sha256:
        raise ConfigError(
            f"replay.path = {str(file)!r} is not what it was when run = {str(settings.run)!r} was "
            "begun; give run=ANOTHER_FOLDER, or the file of then to go on with it"
        )
    return traces


def print_replay(settings: CausalDrafterRecipe) -> None:
    """What would be replayed, if anything. Raises ConfigError as `check_replay`."""
    traces = check_replay(settings)
    if traces is not None:
        print(f"replay       {traces}")


def replayed_examples(
    settings: CausalDrafterRecipe,
    examples: Examples | TaughtExamples,
    rows: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    draftable: Tensor | None,
) -> Examples | TaughtExamples | WeighedExamples:
    """The same examples, with more weight on what was rejected, where a trace is given.

    Says how much and records it in the run. Raises ConfigError as `check_replay` and
    `find_rejections`.
    """
    traces = check_replay(settings)
    if traces is None:
        return examples
    found = find_rejections(settings, traces, rows, tokenizer, draftable)
    if join_processes().is_main_process:
        _record(settings.run / RECORD, traces, found)
    return WeighedExamples(examples, found)


def find_rejections(
    settings: CausalDrafterRecipe,
    traces: Traces,
    rows: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    draftable: Tensor | None,
) -> Rejections:
    """Where learned tokens of the distilled rows were rejected.

    Left out are rejections behind the first token at which a trace leaves the distilled output
    (rounding), those of tokens that the drafter cannot draft (not in draftable [C]), and of the
    first token where the target tells it. Raises ConfigError where the trace is of other rows or of
    another target, or nothing is left.
    """
    first = 0 if settings.drafter.prompt == "own" else 1
    known = None if draftable is None else set(draftable.tolist())
    on_path = _on_path(traces, rows, tokenizer)
    places = {}
    for row, shared in on_path.items():
        output, traced = rows[row]["target_ids"], traces.rows[rows[row]["row"]]
        own = [place for place in traced.rejected if first <= place < shared]
        own = [place for place in own if known is None or output[place] in known]
        if own:
            places[row] = own
    if not places:
        raise ConfigError(
            f"{traces.name}: none of its {traces.rejected:,} rejections is of a token that is "
            "learned, so that there is nothing to replay; trace more rows, or leave replay out"
        )
    tokens = int((row_lengths(rows)[:, 1] - first).clip(min=0).sum())
    return Rejections(places, len(on_path), tokens, settings.replay.share)


def _on_path(
    traces: Traces, rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase
) -> dict[int, int]:
    """Tokens of each traced row's output up to where the trace leaves it, by the row's index.

    Raises ConfigError where no row was traced, or most tokens are of other outputs.
    """
    found: dict[int, int] = {}
    compared, apart = 0, ""
    for row, number in enumerate(rows["row"]):
        traced = traces.rows.get(number)
        if traced is None:
            continue
        output = rows[row]["target_ids"]
        own = tokenizer.convert_ids_to_tokens(output) if traced.as_pieces else output
        both = list(zip(own, traced.tokens, strict=False))
        shared = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
        found[row] = shared
        compared += len(both)
        if shared < len(both) and not apart:
            apart = _apart(traced, number, shared, both[shared])
    if not found:
        raise ConfigError(
            f"{traces.name} has none of the {len(rows):,} distilled rows, but row "
            f"{min(traces.rows)} and others; trace the prompts of `data`"
        )
    agreed = sum(found.values())
    if agreed < AGREEMENT * compared:
        raise ConfigError(
            f"{traces.name} is not along the target's distilled outputs: of {compared:,} tokens "
            f"{agreed:,} are before the first other one of their row, as {apart}; trace greedily, "
            "with this target, its tokenizer and the prompts of `data`"
        )
    return found


def _apart(traced: TracedRow, number: int, place: int, tokens: tuple[Any, Any]) -> str:
    own, other = tokens
    return (
        f"in row {number} (line {traced.line}), whose token {place} is {other!r} there and {own!r} "
        "of the target"
    )


def _record(file: Path, traces: Traces, found: Rejections) -> None:
    """Say and write down what is replayed."""
    say(
        f"replay: {traces.path}: {found.rows:,} rows traced, {found.count:,} of {found.tokens:,} "
        f"learned tokens rejected; each weighs {found.weight:.1f}, all others 1"
    )
    facts = {
        "path": str(traces.path),
        "sha256": traces.sha256,
        "rows": found.rows,
        "tokens": found.tokens,
        "rejected": found.count,
        "weight": found.weight,
    }
    with renamed_when_whole(file) as temporary:
        temporary.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
