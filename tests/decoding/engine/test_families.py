"""docs/make_models.py, which tries all classes of Transformers, on a few of them."""

import importlib.util
import re
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "docs" / "make_models.py"


def test_classes_that_work_are_distinguished_from_those_that_do_not(tmp_path, monkeypatch):
    """RoBERTa's positions differ from those of `generate`, Switch reads router logits from the
    encoder's output, Speech2Text takes audio masks, Musicgen has several vocabularies."""
    spec = importlib.util.spec_from_file_location("make_models", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "make_models", script)
    spec.loader.exec_module(script)
    page = tmp_path / "models.md"
    names = [f"{name}ForConditionalGeneration" for name in ("SwitchTransformers", "Speech2Text")]
    names.append("RobertaForCausalLM")
    script.main([f"--only={','.join(names)},MusicgenForCausalLM", f"--out={page}", "--jobs=1"])
    works, refused = page.read_text(encoding="utf-8").split("## Refused")
    assert all(re.search(rf"\| {name} \| .* \| \de-\d\d \|", works) for name in names)
    assert "no single output projection" in refused


def test_no_class_is_silently_wrong_or_fails_without_a_reason():
    page = (SCRIPT.parent / "models.md").read_text(encoding="utf-8")
    assert "| works | 1" in page
    assert "## Wrong" not in page and "## Error" not in page
