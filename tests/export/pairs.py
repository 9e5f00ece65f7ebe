"""Tiny pairs for exports: a random target, a drafter that often agrees with it, a head for it."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from drafttrain.config.commands import ExportConfig
from drafttrain.config.recipes import DrafterConfig
from drafttrain.decoding.engine.teacher_forcing import projection_scale
from drafttrain.export.folder import write_export
from drafttrain.export.model_card import write_card
from drafttrain.export.parts import load_parts
from drafttrain.export.verify import Check, compare
from drafttrain.models.acceptance_head import AcceptanceHead, AcceptanceHeadConfig
from drafttrain.models.drafters import reads_states
from drafttrain.models.identity import hash_target, hash_weights
from drafttrain.models.spec_drafter.build import build, make_config
from drafttrain.models.speech import takes_audio
from tests.tiny_models import tiny_model
from tests.tiny_targets import tiny_tokenizer

Change = Callable[[Path], dict[str, object]]
"""Writes other models or files into a folder and returns the settings that name them."""
SAMPLING = {"temperature": 1.0, "top_k": 20, "top_p": 1.0}
FEW = ([4, 9], [5, 7, 11], [22])
"""Inputs of a quick check of an export."""


def noisy_copy(family: str, noise: float = 0.3) -> PreTrainedModel:
    """Returns the family's target with noise in its output weights, as a drafter that is often
    right."""
    model = tiny_model(family)
    torch.manual_seed(17)
    model.lm_head.weight.data += noise * torch.randn_like(model.lm_head.weight)
    return model


def save_drafter(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float64) -> Path:
    noisy_copy(family).to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def make_head(model: PreTrainedModel, depth: int = 1, **changes: object) -> AcceptanceHead:
    """Returns a random head whose predictions vary between tokens."""
    settings = {
        "hidden_size": model.config.get_text_config(decoder=True).hidden_size,
        "depth": depth,
        "drafter": {"path": "tiny-drafter", "weights_sha256": hash_weights(model)},
        "target": {"path": "org/tiny-target", "weights_sha256": "0" * 64},
        "sampling": SAMPLING,
    }
    torch.manual_seed(5)
    head = AcceptanceHead(AcceptanceHeadConfig(**(settings | changes)))
    head.out.bias.data += 1.0
    return head


def export_to(out: Path, **settings: object) -> Path:
    """Exports as `drafttrain export` does, without its report.

    For speed the export is reloaded in this process, and drafts are compared on three inputs only.
    """
    config = ExportConfig(out=out, **settings)
    parts = load_parts(config)
    write_export(
        out,
        parts,
        lambda found: write_card(config, None, parts, found),
        Check(FEW),
        reload=compare,
        force=config.force,
    )
    return out


def save_spec_drafter(
    folder: Path, target: PreTrainedModel, path: Path, k: int = 4, **shape: object
) -> Path:
    """Saves a Spec-Drafter initialised from the target, which is stored at `path`."""
    settings = DrafterConfig(k=k, decoder_layers=2, **shape)
    config = make_config(target.config, settings, 3, {"path": str(path)}, projection_scale(target))
    if reads_states(config):
        config.target["weights_sha256"] = hash_target(target)
        config.target["takes_audio"] = takes_audio(target.config)
    if (few := settings.output_tokens) is not None:
        config.draftable_tokens = list(range(few))
    drafter, _ = build(config, target, "both", torch.float64)
    drafter.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_head(folder: Path, model: PreTrainedModel, **changes: object) -> Path:
    make_head(model, **changes).save_pretrained(folder)
    return folder
