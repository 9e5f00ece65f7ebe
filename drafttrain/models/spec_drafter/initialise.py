"""Start a Spec-Drafter from its target's weights: embeddings, encoder and decoder layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.models.spec_drafter.families import weight_sources
from drafttrain.models.spec_drafter.model import SpecDrafter


@dataclass
class Account:
    """What became of the drafter's parameters. Names are the drafter's own."""

    loaded: dict[str, str] = field(default_factory=dict)
    """Drafter parameter -> target parameters it was copied from."""
    missing: list[str] = field(default_factory=list)
    """Drafter parameters that start at random."""
    unexpected: list[str] = field(default_factory=list)
    """Target parameters that found no place (layers left out are not counted)."""

    def __str__(self) -> str:
        lines = [f"initialised {len(self.loaded)} parameters from the target"]
        if self.missing:
            lines.append(f"  at random ({len(self.missing)}): {', '.join(self.missing)}")
        if self.unexpected:
            lines.append(
                f"  without a place ({len(self.unexpected)}): {', '.join(self.unexpected)}"
            )
        return "\n".join(lines)


def initialise(drafter: SpecDrafter, target: PreTrainedModel, parts: str) -> Account:
    """Copy the target's weights into the drafter: parts is none, encoder or both.

    Embeddings and output rows come with `encoder` and `both`. Every target parameter is either
    copied, belongs to a layer or part that is left out on purpose, or is named `unexpected`.
    """
    account = Account()
    own = drafter.state_dict()
    if parts != "none":
        theirs = target.state_dict()
        wanted = weight_sources(drafter.config, target.config)
        if parts == "encoder":
            wanted = {k: v for k, v in wanted.items() if not k.startswith("decoder.")}
        used: set[str] = set()
        for name, sources in wanted.items():
            present = [source for source in sources if source in theirs]
            if name not in own or not present:
                continue
            # keys alone may lack a bias (Whisper)
            none = torch.zeros_like(theirs[present[0]])
            value = torch.cat([theirs.get(source, none) for source in sources])
            _copy(own[name], value, name, sources)
            account.loaded[name] = " + ".join(sources)
            used.update(present)
        elsewhere = {"encoder": ".decoder."}.get(parts)
        left = [name for name in theirs if not (elsewhere and elsewhere in f".{name}")]
        if drafter.encoder is None:
            left = [name for name in left if ".encoder." not in f".{name}"]
        account.unexpected = [name for name in left if _homeless(name, used, theirs)]
    drawn = (name for name, _ in drafter.named_parameters())
    account.missing = [name for name in drawn if name not in account.loaded]
    return account


@torch.no_grad()
def _copy(own: Tensor, value: Tensor, name: str, sources: list[str]) -> None:
    if name == "embedding.weight":  # the mask row, where it is one of its own, stays random
        rows = min(len(own), len(value))
        own[:rows].copy_(value[:rows])
        return
    if name == "logits_bias":  # [1, V] in the target
        value = value.squeeze(0)
    if own.shape != value.shape:
        raise ValueError(
            f"drafter parameter {name} has shape {tuple(own.shape)}, but {' + '.join(sources)} of "
            f"the target has {tuple(value.shape)}; set drafter.initialise=none or report the model"
        )
    own.copy_(value)


def _homeless(name: str, used: set[str], theirs: dict[str, Tensor]) -> bool:
    if name in used:
        return False
    value = theirs[name]
    alike = (theirs[other] for other in used if theirs[other].shape == value.shape)
    if any(torch.equal(value, other) for other in alike):  # tied to one that was copied
        return False
    return not any(part in name for part in (".layers.", ".block.", "embed_positions"))
