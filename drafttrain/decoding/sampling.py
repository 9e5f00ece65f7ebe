"""Warping of logits into probabilities, and the random source used outside tests."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from drafttrain.decoding.types import NotFinite, Sampling


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Converts logits to the probabilities to sample from: temperature, then top-k, top-p, min-p.

    Order and ties are those of Transformers' warpers: top-k keeps every token that ties with the
    k-th; top-p keeps the smallest set of most likely tokens whose mass reaches p; min-p keeps
    tokens at least p times as likely as the most likely one. Temperature 0 gives the point mass on
    the arg-max (the first one on ties). Computes in float32, or in float64 if the logits are.

    Shapes: [..., V] -> [..., V].
    """
    scores = at_least_float32(logits)
    if sampling.greedy:
        best = scores.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(scores).scatter_(-1, best, 1.0)
    scores = scores / sampling.temperature
    if sampling.top_k > 0:
        top = scores.topk(min(sampling.top_k, scores.shape[-1]), dim=-1).values
        scores = scores.masked_fill(scores < top[..., -1:], -torch.inf)
    if sampling.top_p < 1.0:
        ascending, order = scores.sort(dim=-1)
        removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - sampling.top_p
        removed[..., -1] = False
        scores = scores.masked_fill(removed.scatter(-1, order, removed), -torch.inf)
    if sampling.min_p > 0.0:
        probs = scores.softmax(dim=-1)
        lowest = sampling.min_p * probs.amax(dim=-1, keepdim=True)
        scores = scores.masked_fill(probs < lowest, -torch.inf)
    return scores.softmax(dim=-1)


def probs_of_tokens(logits: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    """Returns the probability under `warp` of one token per row, in float64 on the CPU.

    Shapes: logits [N, V], tokens [N] -> [N].
    """
    tokens = tokens.to(logits.device)
    return warp(logits, sampling).gather(-1, tokens[:, None])[:, 0].double().cpu()


GROUP = 8
"""Size of the groups whose maxima `likeliest` compares first."""


def likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest scores of each row in descending order and their tokens (top-k).

    On a CPU it first selects the `count` groups with the largest maxima, which contain all of the
    largest scores. This takes two thirds of the time of `topk`. Shapes: [R, V] -> [R, C], [R, C].
    """
    rows, vocabulary = scores.shape
    groups = vocabulary // GROUP
    count = min(count, vocabulary)
    if scores.device.type != "cpu" or groups <= count:
        return scores.topk(count, dim=-1)
    grouped = GROUP * groups  # the remaining tokens are always candidates
    # group g holds the tokens g, g + groups, g + 2 * groups, ...
    best = scores[:, :grouped].view(rows, GROUP, groups).amax(1).topk(count, sorted=False).indices
    members = torch.arange(0, grouped, groups)[:, None]
    remaining = torch.arange(grouped, vocabulary).expand(rows, -1)
    candidates = torch.cat(((best[:, None] + members).flatten(1), remaining), dim=1)
    values, indices = scores.gather(1, candidates).topk(count)
    return values, candidates.gather(1, indices)


def at_least_float32(logits: Tensor) -> Tensor:
    """Converts logits to float32; float64 is kept."""
    return logits if logits.dtype == torch.float64 else logits.float()


def sequence_randomness(
    seed: int, row: int, device: torch.device | str = "cpu"
) -> SampledRandomness:
    """Returns the random source of one sequence.

    It depends only on the run's seed and the row's number, so the tokens sampled for a row do not
    depend on other rows or on their order.
    """
    key = np.random.SeedSequence([seed, row]).generate_state(1, np.uint64)[0]
    generator = torch.Generator(device).manual_seed(int(key) & (2**63 - 1))
    return SampledRandomness(generator)


def draw_tokens(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Samples tokens by inverting the cumulative distribution of each row, in float64.

    Tokens of probability zero are never drawn. Shapes: probs [R, V], uniforms [R, N] in [0, 1) ->
    [R, N].
    """
    return _invert(probs.cumsum(dim=-1, dtype=torch.float64), uniforms)


def _invert(mass: Tensor, uniforms: Tensor) -> Tensor:
    """`draw_tokens` from the cumulative sums [R, V] of the probabilities."""
    total = mass[:, -1:].contiguous()
    tokens = torch.searchsorted(mass, (uniforms.to(mass) * total).contiguous(), right=True)
    last = torch.searchsorted(mass, total)  # first token at which the sum is complete
    return tokens.minimum(last).clamp(max=mass.shape[-1] - 1)


class SampledRandomness:
    """`Randomness` that draws from one torch generator, on the generator's device."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._numpy: np.random.Generator | None = None

    def categorical(self, probs: Tensor) -> Tensor:
        """Needs one uniform value per row; `torch.multinomial` draws one for every token.

        Raises NotFinite for probabilities that are not finite.
        """
        mass = probs.cumsum(dim=-1, dtype=torch.float64)
        if not torch.isfinite(mass[:, -1]).all():
            raise NotFinite(
                "the probabilities to sample from are not finite: a model gave NaN or infinite "
                "logits, or a logits processor excluded every token; load it in float32 or bfloat16"
            )
        return _invert(mass, self.uniform(mass[:, :1]))[:, 0]

    def accept_run(self, probs: Tensor) -> int:
        return int((self.uniform(probs) < probs).cumprod(dim=0).sum())

    def without_replacement(self, probs: Tensor, count: int) -> Tensor:
        """Gumbel-top-k trick (Vieira 2014; Kool et al. 2019): the largest log-probabilities plus
        Gumbel noise, in descending order.
        """
        keys = probs.log() + self.gumbel(probs)
        best = keys.topk(count, dim=-1)
        return best.indices.masked_fill(best.values == -torch.inf, -1)

    def uniform(self, like: Tensor) -> Tensor:
        """Samples independent values from [0, 1) in the shape and dtype of `like`."""
        return torch.rand(
            like.shape, dtype=like.dtype, device=like.device, generator=self.generator
        )

    def gumbel(self, like: Tensor) -> Tensor:
        """Minus the logarithm of exponential values. On the CPU it uses NumPy, which is several
        times faster and is seeded from the generator."""
        if like.device.type != "cpu":
            drawn = torch.empty_like(like).exponential_(generator=self.generator)
        else:
            if self._numpy is None:
                seed = torch.randint(2**63 - 1, (), generator=self.generator)
                self._numpy = np.random.Generator(np.random.SFC64(int(seed)))
            drawn = torch.from_numpy(self._numpy.standard_exponential(tuple(like.shape)))
        smallest = torch.finfo(drawn.dtype).tiny
        return -drawn.clamp_min_(smallest).log_().to(like.dtype)
