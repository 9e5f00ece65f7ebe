"""Warping of logits into probabilities, and the random choices of production decoding."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from drafttrain.decoding.types import NotFinite, Sampling


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities as the user asked to sample: temperature, then top-k, top-p, min-p.

    Order and ties as in Transformers' warpers: top-k keeps every token that ties the k-th; top-p
    keeps the smallest set of most likely tokens whose mass reaches p; min-p keeps those that are at
    least p times as likely as the likeliest. Temperature 0 is the point
    mass on the arg-max (the first, on ties). Computed in float32 at least; float64 is kept.

    Shapes: [..., V] -> [..., V].
    """
    scores = exact_enough(logits)
    if sampling.greedy:
        best = scores.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(scores).scatter_(-1, best, 1.0)
    scores = scores / sampling.temperature
    if sampling.top_k > 0:
        scores = _keep_top_k(scores, sampling.top_k)
    if sampling.top_p < 1.0:
        scores = _keep_top_p(scores, sampling.top_p)
    if sampling.min_p > 0.0:
        probs = scores.softmax(dim=-1)
        lowest = sampling.min_p * probs.amax(dim=-1, keepdim=True)
        scores = scores.masked_fill(probs < lowest, -torch.inf)
    return scores.softmax(dim=-1)


def probs_of_tokens(logits: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    """The probability of one token of each row, as `warp` has it, in float64 on the CPU.

    Shapes: logits [N, V], tokens [N] -> [N].
    """
    tokens = tokens.to(logits.device)
    if sampling.greedy:
        return (logits.argmax(dim=-1) == tokens).double().cpu()
    return warp(logits, sampling).gather(-1, tokens[:, None])[:, 0].double().cpu()


GROUP = 8
"""Scores of a group, of which `likeliest` first looks at the best alone."""


def likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest scores of each row in falling order, and their tokens; as `topk`.

    On a CPU in two steps, which take two thirds of the time: the largest are all in the groups with
    the largest maxima. Shapes: [R, V] -> [R, C], [R, C].
    """
    rows, vocabulary = scores.shape
    groups = vocabulary // GROUP
    count = min(count, vocabulary)
    if scores.device.type != "cpu" or groups <= count:
        return scores.topk(count, dim=-1)
    grouped = GROUP * groups  # what is left over is looked at in any case
    best = scores[:, :grouped].view(rows, GROUP, groups).amax(1).topk(count, sorted=False).indices
    members = torch.arange(0, grouped, groups)[:, None]
    left = torch.arange(grouped, vocabulary).expand(rows, -1)
    places = torch.cat(((best[:, None] + members).flatten(1), left), dim=1)
    values, found = scores.gather(1, places).topk(count)
    return values, places.gather(1, found)


def exact_enough(logits: Tensor) -> Tensor:
    """Scores to make probabilities of: in float32, or in float64 where they are."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _keep_top_k(scores: Tensor, k: int) -> Tensor:
    lowest_kept = scores.topk(min(k, scores.shape[-1]), dim=-1).values[..., -1:]
    return scores.masked_fill(scores < lowest_kept, -torch.inf)


def _keep_top_p(scores: Tensor, top_p: float) -> Tensor:
    ascending, order = scores.sort(dim=-1)
    mass_up_to = ascending.softmax(dim=-1).cumsum(dim=-1)
    remove = mass_up_to <= 1.0 - top_p
    remove[..., -1] = False
    return scores.masked_fill(remove.scatter(-1, order, remove), -torch.inf)


def sequence_randomness(
    seed: int, row: int, device: torch.device | str = "cpu"
) -> SampledRandomness:
    """The random choices of one sequence.

    They follow from the run's seed and the row's number alone, so that what is sampled for a row
    does not depend on what else is decoded, or in which order.
    """
    key = np.random.SeedSequence([seed, row]).generate_state(1, np.uint64)[0]
    generator = torch.Generator(device).manual_seed(int(key) & (2**63 - 1))
    return SampledRandomness(generator)


def draw_tokens(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens of each row by inversion of its distribution function, in float64.

    Tokens of probability zero are never drawn. Shapes: probs [R, V], uniforms [R, N] in [0, 1) ->
    [R, N].
    """
    mass = probs.double().cumsum(dim=-1)
    total = mass[:, -1:].contiguous()
    tokens = torch.searchsorted(mass, (uniforms.to(mass) * total).contiguous(), right=True)
    last = torch.searchsorted(mass, total)  # first token that reaches the whole mass
    return tokens.minimum(last).clamp(max=probs.shape[-1] - 1)


class SampledRandomness:
    """`Randomness` in production: draws from one generator, on the generator's device."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._numpy: np.random.Generator | None = None

    def categorical(self, probs: Tensor) -> Tensor:
        """One index from each row: where a uniform draw falls in the cumulative sum, in float64.

        A row costs a pass over it and one draw, where `torch.multinomial` draws for every token.
        Shapes: probs [R, V] -> [R]. Raises NotFinite for probabilities that are not finite.
        """
        upto = probs.cumsum(dim=-1, dtype=torch.float64)
        total = upto[:, -1:].contiguous()
        if not torch.isfinite(total).all():
            raise NotFinite(
                "probabilities to sample from are not finite: a model gave NaN or infinite logits, "
                "or a logits processor left no token; load it in float32 or bfloat16"
            )
        drawn = total * self.uniform(total)
        places = torch.searchsorted(upto, drawn, right=True)  # tokens of probability 0 are skipped
        return torch.minimum(places, torch.searchsorted(upto, total))[:, 0]

    def accept_run(self, probs: Tensor) -> int:
        """Independent events that come true before the first that does not. Shape: probs [N]."""
        return int((self.uniform(probs) < probs).cumprod(dim=0).sum())

    def without_replacement(self, probs: Tensor, count: int) -> Tensor:
        """Indices drawn one after another from each row, none twice; -1 where none is left.

        By the Gumbel-top-k trick (Vieira 2014; Kool et al. 2019): the largest log-probabilities
        plus noise, in falling order. Shapes: probs [R, V] -> [R, count].
        """
        keys = probs.log() + self.gumbel(probs)
        best = keys.topk(count, dim=-1)
        return best.indices.masked_fill(best.values == -torch.inf, -1)

    def uniform(self, like: Tensor) -> Tensor:
        """Independent draws from [0, 1), of the shape and type of `like`."""
        return torch.rand(
            like.shape, dtype=like.dtype, device=like.device, generator=self.generator
        )

    def gumbel(self, like: Tensor) -> Tensor:
        """Independent standard Gumbels: -log of exponential draws.

        On the CPU NumPy draws them, several times faster; its generator follows from this one.
        """
        if like.device.type != "cpu":
            drawn = torch.empty_like(like).exponential_(generator=self.generator)
        else:
            if self._numpy is None:
                seed = torch.randint(2**63 - 1, (), generator=self.generator)
                self._numpy = np.random.Generator(np.random.SFC64(int(seed)))
            drawn = torch.from_numpy(self._numpy.standard_exponential(tuple(like.shape)))
        smallest = torch.finfo(drawn.dtype).tiny
        return -drawn.clamp_min_(smallest).log_().to(like.dtype)
