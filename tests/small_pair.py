"""Small pairs on disk for whole commands: a decoder-only pair, and a run of a Spec-Drafter."""

import json
from pathlib import Path

from drafttrain.config.reading import dump_settings
from drafttrain.config.recipes import DrafterConfig, SpecDrafterRecipe
from tests.export.pairs import noisy_copy, save_spec_drafter
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target

LENGTH = 10
SHORT = ["baselines=[generate]", "repeats=1", "warmup=0"]
SHORT += [f"decode.sampling.max_new_tokens={LENGTH}"]
PAIR = ["--target", "llama", "--drafter", "small", "--data", "texts.txt"]


def save_small_pair(root: Path) -> Path:
    """Saves target, drafter, prompts to report on, and others for acceptance by rank."""
    save_target(tiny_model("llama").float(), root / "llama")
    save_target(noisy_copy("llama", 0.5).float(), root / "small")
    (root / "texts.txt").write_text("w5 w6 w7\nw9 w4 w30\n")
    (root / "others.txt").write_text("w12 w20\nw8 w33 w5\n")
    return root


def save_run(folder: Path, target: Path, held_out: Path | None = None) -> Path:
    """Saves a finished run: an untrained Spec-Drafter initialised from the Marian at `target`."""
    save_spec_drafter(folder / "final", tiny_model("marian").float(), target)
    recipe = SpecDrafterRecipe(
        run=folder,
        target={"path": str(target)},
        data={"path": "texts.txt"},
        held_out=None if held_out is None else {"path": str(held_out)},
        drafter=DrafterConfig(k=4),
    )
    (folder / "run.yaml").write_text(dump_settings(recipe))
    return folder


def read_trees() -> tuple[dict, list[dict]]:
    """Reads trees.json and its samples."""
    samples = Path("trees.samples.jsonl").read_text().splitlines()
    return json.loads(Path("trees.json").read_text()), [json.loads(line) for line in samples]


def methods_of(report: dict) -> dict[str, dict]:
    return {one["name"]: one for one in report["runs"] if one["kind"] == "method"}
