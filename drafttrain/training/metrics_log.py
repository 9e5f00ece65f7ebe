"""What a run says about itself while it trains: metrics.jsonl and the trackers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from accelerate import Accelerator
from torch import Tensor, nn

from drafttrain.config.recipes import TrainConfig
from drafttrain.data.shards.writing import named_disk_errors, renamed_when_whole


def mean_rates(sums: Tensor, parts: Mapping[str, nn.Module] | None) -> dict[str, float]:
    """Mean loss and accuracy of some steps; with parts, their means over the parts and then each
    part's. Waits for the device. Shapes: sums [4] or [4, parts]: loss, weight, correct, counted."""
    loss, weight, correct, counted = sums.cpu()
    rates = {"loss": loss / weight.clamp(min=1e-9), "accuracy": correct / counted.clamp(min=1.0)}
    found = {name: float(rate.mean()) for name, rate in rates.items()}
    for index, part in enumerate(parts or ()):
        found |= {f"{name}/{part}": float(rate[index]) for name, rate in rates.items()}
    return found


class MetricsLog:
    """metrics.jsonl in the run folder, and the trackers asked for."""

    def __init__(self, accelerator: Accelerator, run: Path, step: int, settings: TrainConfig):
        self.accelerator, self.file = accelerator, run / "metrics.jsonl"
        if settings.trackers:
            accelerator.init_trackers("drafttrain", config={"run": run.name})
        if accelerator.is_main_process and self.file.exists():  # drop what a resumed run repeats
            lines = self.file.read_text(encoding="utf-8").splitlines()
            kept = [x for x in lines if x.endswith("}") and json.loads(x)["step"] <= step]
            with renamed_when_whole(self.file) as temporary:
                temporary.write_text("".join(f"{x}\n" for x in kept), encoding="utf-8")

    def write(self, step: int, values: dict[str, float]) -> None:
        self.accelerator.log(values, step=step)
        if self.accelerator.is_main_process and values:
            line = json.dumps({"step": step} | values) + "\n"
            with named_disk_errors(self.file.parent), self.file.open("a", encoding="utf-8") as file:
                file.write(line)
