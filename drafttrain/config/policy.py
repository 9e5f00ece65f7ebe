"""policy.json: the stop policy and the verifier that were chosen for a drafter."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt

from drafttrain.config.base import Config
from drafttrain.config.decode import CascadeConfig, StopConfig, TreeConfig, VerifierConfig
from drafttrain.config.stops import STOPS

PolicyStop = Literal[*(name for name, stop in STOPS.items() if "expected" not in stop.requires)]
"""Those of chains: what they go by is not the expected acceptance of a tree."""


class DraftMethod(Config):
    """What drafts where no chain of the drafter's own is the best: a tree or a cascade."""

    model_config = ConfigDict(extra="ignore")

    tree: TreeConfig | None = None
    """The tree; stop ends its growth."""
    stop: StopConfig | None = None
    """Levels of the tree, or the gain that it ends by."""
    cascade: CascadeConfig | None = None
    """The drafters behind the drafter, with increments and leniency."""
    bigrams: str | None = None
    """max-gram's table, where it has one."""


class Policy(Config):
    """policy.json: what was chosen for a drafter, and for which decoding.

    Its stop policy is that of a chain, which every program can follow; `method` is what this one
    decodes with where that is faster. It lies beside the acceptance head's folder; other keys in it
    are facts about the choice.
    """

    model_config = ConfigDict(extra="ignore")

    stop: PolicyStop
    """Kind of the stop policy, as StopConfig has it."""
    k: PositiveInt | None = None
    """Tokens drafted in a round by a fixed policy."""
    max_draft: PositiveInt = 20
    """Most tokens drafted in a round by the others."""
    head: str | None = None
    """Name of the head (D3-w6): its folder in a run of heads."""
    h: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Stop when a rejection is likelier than this."""
    entropy: PositiveFloat | None = None
    """Stop after a row of more than so many nats."""
    confidence: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Stop after a token of less than this probability."""
    cumulative: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Stop once the product of the rows' largest probabilities is less than this."""
    sampling: dict[str, float] = {}
    """Temperature, top_k and top_p that it was chosen for; under others the output is as exact."""
    drafter: str | None = None
    """What proposes: in an export the drafter's model_type (spec-drafter, llama, ...)."""
    verifier: VerifierConfig = VerifierConfig()
    """How drafted tokens are accepted; spec-verification counts in greedy decoding only."""
    method: DraftMethod | None = None
    """The tree or cascade that is faster than the chain; None: none is. For sampling of the kind
    that it was chosen for."""

    speculate: bool = True
    """False: plain decoding was faster than every draft, in decoding of that kind."""
    batches: dict[PositiveInt, Policy] = {}
    """The policies of larger numbers of sequences decoded at once."""

    def at(self, batch_size: int) -> Policy:
        """The policy chosen for the largest measured batch size up to this one; else this."""
        smaller = [size for size in self.batches if size <= batch_size]
        return self.batches[max(smaller)] if smaller else self

    def lengths_by_batch(self) -> list[tuple[int, int]]:
        """(largest batch size, draft length), sizes rising, where fixed lengths were chosen and not
        the same one everywhere; else none. The last size is the largest that was measured. Length
        0: nothing is drafted there."""
        sizes = sorted(self.batches)
        chosen = [self, *(self.batches[size] for size in sizes)]
        if any(one.stop != "fixed" or one.k is None for one in chosen):
            return []
        lengths: list[tuple[int, int]] = []
        for policy, last in zip(chosen, [*(size - 1 for size in sizes), *sizes[-1:]], strict=False):
            k = policy.k if policy.speculate else 0
            if lengths and lengths[-1][1] == k:
                lengths.pop()
            if last > 0:
                lengths.append((last, k))
        return lengths if len(lengths) > 1 else []

    def chosen_for(self, greedy: bool) -> bool:
        """Whether it was chosen for decoding of this kind."""
        return greedy == (self.sampling.get("temperature", 0.0) == 0.0)

    def method_for(self, greedy: bool) -> DraftMethod | None:
        """The tree or cascade to decode with; None for another kind of decoding than it is for."""
        return self.method if self.chosen_for(greedy) else None

    def stop_config(self) -> StopConfig:
        """The stop policy as settings, without the head's folder, which only its user knows."""
        names = set(STOPS[self.stop].settings) - {"head"}
        return StopConfig(kind=self.stop, **self.model_dump(include=names, exclude_none=True))
