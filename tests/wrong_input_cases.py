"""What a wrong input is, and the commands that it is given to."""

from __future__ import annotations

from dataclasses import dataclass

SPEC = "train_spec_drafter.py --config train_spec_drafter.yaml"
HEADS = "train_acceptance_head.py --config train_acceptance_head.yaml"
SMALL = "train_target.py --config train_target.yaml"
DISTILL = "drafttrain distill --target target --data texts.txt --out new"
CACHE = "drafttrain cache --target target --drafter target --distilled shards --out new"
EVAL = "drafttrain eval --data rows.jsonl"
CAUSAL = "drafttrain eval --target llama --drafter small --data rows.jsonl"
GENERATE = "drafttrain generate --text w5"
TUNE = "drafttrain tune --heads heads"
EXPORT = "drafttrain export --drafter small --out new"


@dataclass(frozen=True)
class WrongInput:
    """A command line that must be refused."""

    line: str
    says: tuple[str, ...]
    """What the message must name: field or row, value, remedy."""
    place: str = "."
    """Folder of the project to run it in."""
    weights: bool = False
    """Whether weights must be read to know that it is wrong."""
