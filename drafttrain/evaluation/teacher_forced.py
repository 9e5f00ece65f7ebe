"""Teacher-forced acceptance: which drafts would be accepted on known outputs of the target.

A drafter computes the probability of drafting the output's tokens at every prefix. In greedy
decoding it is 1 or 0 and determines the rounds exactly. If the target sampled the output, rejection
sampling accepts the draft token with expected probability min(1, draft / target) given the output's
token, and a draft up to a position with the product of these. The rates are averages over all
prefixes; decoding begins rounds at only some of them, so its rates may differ slightly.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.build.method import Method
from drafttrain.config.decode import SamplingConfig
from drafttrain.config.kinds import KINDS
from drafttrain.config.progress import tracking
from drafttrain.data.batches.examples import Example, Examples
from drafttrain.data.batches.masked_blocks import BlocksCollator, blocks_of_rows
from drafttrain.decoding.batching import BatchedSteps, as_steps, run_batched
from drafttrain.decoding.drafters.causal import teacher_forced_rows
from drafttrain.decoding.drafters.teacher_forced import NOT_DRAFTED, KnownOutput, read_outputs
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.target_states import TargetRequirements
from drafttrain.decoding.types import Proposal, Sampling
from drafttrain.evaluation.bootstrap import Array, Ratio
from drafttrain.evaluation.calibration import round_starts
from drafttrain.evaluation.metrics import RoundCounts
from drafttrain.evaluation.prompts import Prompt, is_cut
from drafttrain.evaluation.runner import decode_by, plain_method

DECODED_AT_ONCE = 16
OVERLAPS = ("greedy_match", "sampled_acceptance", "first_choice_acceptance")
"""Acceptance of a language model's next draft token in engines; see `measure_overlaps`."""


@dataclass(frozen=True)
class TargetOutput:
    """An output of the target, decoded plainly."""

    known: KnownOutput
    """Source and tokens, with the target states that drafters read."""
    target_probs: Tensor | None
    """[L, V] the target's warped distribution at each token; None if not needed."""
    limit: int
    """Maximal number of new tokens; a draft leaves room for the bonus token."""


@dataclass(frozen=True)
class ForcedCounts:
    """Teacher-forced counts of one method over all outputs."""

    counts: RoundCounts
    positions: Array
    """[3, P, K] as returned by `count_positions`."""
    overlaps: dict[str, Ratio] = field(default_factory=dict)
    """Metrics of `measure_overlaps` by name; only for language models."""
    cut: int = 0
    """Plain decoding only: number of outputs cut where the target's positions end."""


def measure_forced(
    target: CachedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    sampling: SamplingConfig,
    progress: bool = False,
) -> list[ForcedCounts]:
    """Decodes every prompt plainly and counts what each method would accept on the outputs.

    Methods draft chains of fixed length and verify by greedy match or rejection. Returns the counts
    of plain decoding, then of each method; after Ctrl-C of the prompts done, if any.
    """
    able = [method.drafter for method in methods if method.assistant is not None]
    models = {id(drafter): drafter.model.drafting_all() for drafter in able}
    drawn, done = Sampling.of(sampling), []
    needs_probs = bool(models) or not drawn.greedy
    try:
        with tracking(len(prompts), "teacher-forced", "input", shown=progress) as work:
            for outputs in decode_outputs(target, methods, prompts, sampling, needs_probs):
                steps = [_drafting_probs(methods, output, drawn) for output in outputs]
                for output, probs in zip(outputs, run_batched(steps), strict=True):
                    tokens, pairs = output.known.tokens, zip(methods, probs, strict=True)
                    counts = [count_accepted(*pair, output, drawn.greedy) for pair in pairs]
                    rates = {id_: measure_overlaps(models[id_], output, drawn) for id_ in models}
                    cut = is_cut(target, tokens.tolist(), sampling.max_new_tokens)
                    done.append((len(tokens), cut, counts, rates))
                    work.update()
    except KeyboardInterrupt:
        if not done:
            raise
    lengths, cut, counts, rates = zip(*done, strict=True)
    tokens, none = np.array(lengths, dtype=np.float64), np.zeros(len(done))
    plain = RoundCounts(tokens, tokens, none, none, none)
    found = [ForcedCounts(plain, np.zeros((3, len(done), 0)), cut=sum(cut))]
    for method, own in zip(methods, zip(*counts, strict=True), strict=True):
        sums, positions = (np.stack(parts, axis=1) for parts in zip(*own, strict=True))
        overlaps = {}
        if (key := id(method.drafter)) in models:
            *values, width = torch.stack([one[key] for one in rates], dim=1).numpy()
            named = zip(OVERLAPS, values, strict=False)
            overlaps = {name: Ratio(value, width) for name, value in named}
        found.append(ForcedCounts(RoundCounts(*sums), positions, overlaps))
    return found


@torch.inference_mode()
def decode_outputs(
    target: CachedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    sampling: SamplingConfig,
    needs_probs: bool,
) -> Iterator[list[TargetOutput]]:
    """Decodes the prompts plainly as `drafttrain eval` does, and yields the outputs in batches
    together with the target states that the drafters read."""
    plain, drawn = plain_method(sampling), Sampling.of(sampling)
    wanted = TargetRequirements.union(method.drafter.requires for method in methods)
    for start in range(0, len(prompts), DECODED_AT_ONCE):
        some = prompts[start : start + DECODED_AT_ONCE]
        some = [replace(one, source=target.read(one.source)) for one in some]
        decoded = decode_by(target, plain, sampling, some, len(some))
        sources, tokens = [one.source for one in some], [output.tokens for output in decoded]
        outputs = []
        for known in read_outputs(target, sources, tokens, wanted):
            source, probs = known.source, None
            limit = target.max_new_tokens(source, sampling.max_new_tokens)
            if needs_probs:
                draft = known.tokens[:-1].to(source.prefix.device)
                state = target.encode(source)
                [score] = target.score([(state, source.prefix, Proposal.chain(draft))])
                process = target.processors(drawn).start(source, limit)
                probs = warp(process(source.prefix, draft, score.logits), drawn).cpu()
            outputs.append(TargetOutput(known, probs, limit))
        yield outputs


def _drafting_probs(
    methods: Sequence[Method], output: TargetOutput, sampling: Sampling
) -> BatchedSteps[list[Tensor]]:
    """Returns for each method the probability of drafting the output's tokens at every prefix:
    [L, k], NOT_DRAFTED at positions that it does not draft."""
    length, drafted = len(output.known.tokens), []
    for method in methods:
        k = method.stop.longest
        limit = (output.limit - 1 - np.arange(length)).clip(0, k)
        drafted.append(torch.full((length, k), NOT_DRAFTED, dtype=torch.double))
        if limit.max() > 0:
            teacher_forced = resolve_name(KINDS[method.drafter.name].teacher_forced_probs)
            steps = teacher_forced(method.drafter, output.known, limit.tolist(), sampling)
            probs = yield from as_steps(steps)
            drafted[-1][:, : probs.shape[1]] = probs.cpu()
    return drafted


def count_accepted(
    method: Method, probs: Tensor, output: TargetOutput, greedy: bool
) -> tuple[Array, Array]:
    """Sums the counts of a method's rounds on an output: tokens, rounds, drafted, accepted and
    passes; and drafted, accepted and reached by position.

    Position i of the draft at prefix s is accepted with probability min(1, draft / target) at token
    s + i if all before it were; in greedy decoding this is 1 or 0. Greedy rounds begin where the
    previous one ended, and a draft counts with its maximal length (it could end earlier, with an
    EOS after a wrong token). With sampling the sums are expectations as if a round began at every
    prefix, and positions beyond the output's end are not counted. Shapes: probs [L, k] -> [5],
    [3, k].
    """
    length, k = probs.shape
    kind = KINDS[method.drafter.name]
    prefixes, positions = np.arange(length)[:, None], np.arange(k)
    indices, draft = prefixes + positions, probs.double().numpy()
    drafted = (draft != NOT_DRAFTED) & (positions < output.limit - 1 - prefixes)
    drafted = np.logical_and.accumulate(drafted, axis=1)
    inside = drafted & (indices < length)
    if greedy:
        rates = (draft > 0.5).astype(float)
    else:
        tokens = output.known.tokens
        target = output.target_probs.gather(-1, tokens[:, None])[:, 0].double().numpy()
        at_target = target[indices.clip(max=length - 1)].clip(min=np.finfo(np.float64).tiny)
        rates = np.minimum(1.0, draft / at_target)
    accepted = np.cumprod(np.where(inside, rates, 0.0), axis=1)
    reached = np.where(inside, np.roll(accepted, 1, axis=1), 0.0)  # all positions before accepted
    reached[:, 0] = inside[:, 0]
    starts, counted = np.arange(length), inside
    if greedy:
        runs = accepted.sum(axis=1).astype(int)
        ended = (runs > 0) & (starts + runs == length)  # with EOS; the draft ends there
        counted = drafted = np.where(ended[:, None], inside, drafted)
        starts = round_starts(runs)
    indices, drafted, counted, accepted, reached = (
        one[starts] for one in (indices, drafted, counted, accepted, reached)
    )
    tokens = len(starts) + accepted[indices < length - 1].sum()  # no bonus after the last token
    passes = drafted if kind.drafts == "tokens" else drafted[:, 0] * (kind.drafts == "blocks")
    sums = np.array([tokens, len(starts), counted.sum(), accepted.sum(), passes.sum()])
    return sums.astype(float), np.stack([counted.sum(0), accepted.sum(0), reached.sum(0)])


def measure_overlaps(drafter: CachedModel, output: TargetOutput, sampling: Sampling) -> Tensor:
    """Sums the rates in OVERLAPS over an output's positions and appends the number of positions.

    At each position, with p the target's and q the drafter's distribution: whether both have the
    same most likely token; the sum of min(p, q), the acceptance of rejection sampling; and
    p(argmax q), the acceptance of greedy drafts that are compared with the target's samples. In
    greedy decoding the three are equal, and only the first is returned. Shape: [4], greedy [2].
    """
    known = output.known
    logits = teacher_forced_rows(drafter, known.source, known.tokens)[: max(output.limit - 1, 0)]
    target = output.target_probs[: len(logits)].double()
    draft = warp(logits, sampling).cpu().double()[: len(target)]
    best = draft.argmax(-1, keepdim=True)
    rates = [(target.argmax(-1, keepdim=True) == best).double().sum()]
    if not sampling.greedy:
        rates += [torch.minimum(target, draft).sum(), target.gather(-1, best).sum()]
    return torch.stack([*rates, torch.tensor(float(len(target)))])


def accepted_runs(blocks: Tensor, output: Sequence[int]) -> Array:
    """Counts the leading draft tokens at every prefix that equal the output's next tokens.

    blocks: draft tokens, -1 after the end of a draft. Shapes: blocks [L, k], output [L] -> [L].
    """
    tokens, k = torch.as_tensor(output, dtype=torch.long), blocks.shape[1]
    following = F.pad(tokens, (0, k - 1), value=-2).unfold(0, k, 1)  # [L, k] next tokens
    return (blocks.cpu() == following).cumprod(1).sum(1).numpy()


class BlockDrafts(NamedTuple):
    """Drafts on one output of a drafter in training."""

    blocks: Tensor
    """[L, k] draft tokens at every prefix; -1 after the end of a draft."""
    acceptance: Tensor | None = None
    """[N] expected acceptance of sampled draft tokens, if known."""
    slots: Tensor | None = None
    """[N] slots of these tokens."""


@dataclass(frozen=True)
class BlockValidation:
    """Validates a drafter on held-out rows during training.

    Computes the teacher-forced mean acceptance length (exact for greedily distilled rows), loss,
    slot accuracy and, if the drafts have it, the acceptance of sampled tokens by slot.
    """

    rows: Examples
    collate: Callable[[Sequence[Example]], Any]
    draft: Callable[[nn.Module, Example], BlockDrafts]
    """(objective, row) -> the drafts on its output."""
    batch_rows: int = 64

    def __call__(self, objective: nn.Module) -> dict[str, float]:
        """Validates the `model` of an objective, which maps (batch, progress) to LossSums, and
        returns the metrics by name."""
        drafts, tokens, rounds = [], 0, 0
        sums = torch.zeros(4, dtype=torch.float64)
        for rows in torch.arange(len(self.rows)).split(self.batch_rows):
            chunk = self.rows.__getitems__([(0, row) for row in rows.tolist()])
            losses = objective(self.collate(chunk).to(objective.model.device), 1.0)
            sums += torch.stack([value.double().cpu() for value in losses])
            for example in chunk:
                drafts.append(self.draft(objective, example))
                runs = accepted_runs(drafts[-1].blocks, example.target_ids)
                tokens, rounds = tokens + len(runs), rounds + len(round_starts(runs))
        loss, weight, correct, counted = sums.tolist()
        values = {"mean_acceptance_length": tokens / rounds}
        if weight and counted:  # outputs of single tokens may have nothing to predict
            values |= {"held_out_loss": loss / weight, "slot_accuracy": correct / counted}
        if drafts[0].acceptance is not None:
            accepted = torch.cat([one.acceptance for one in drafts]).double().cpu()
            values["acceptance"] = float(accepted.mean())
        if drafts[0].slots is not None:
            slots = torch.cat([one.slots for one in drafts]).cpu()
            for slot in slots.unique():
                values[f"acceptance/{slot + 1}"] = float(accepted[slots == slot].mean())
        return values


def slot_validation(rows: Examples, collate: BlocksCollator) -> BlockValidation:
    """Returns the validation of a drafter of masked blocks, whose objective computes `rows`,
    `overlap` and `tokens` for the collator's batches. No block is dropped from them."""

    def draft(objective: nn.Module, example: Example) -> BlockDrafts:
        batch = collate.alone([example]).to(objective.model.device)
        logits, _ = objective.rows(batch)
        tokens, length = objective.tokens(logits.argmax(-1)), len(example.target_ids)
        blocks = blocks_of_rows(batch, tokens, collate.k, length).cpu()
        return BlockDrafts(blocks, objective.overlap(batch, logits), batch.slots())

    return BlockValidation(rows, collate.alone, draft, batch_rows=8)
