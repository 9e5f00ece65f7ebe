"""A shallow target grown to a deep one: every layer twice, side by side."""

import pytest
import torch

from benchmarks.grow_target import grow, main
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target


def test_layers_are_repeated_and_all_else_is_kept():
    base = tiny_model("marian", encoder_layers=2, decoder_layers=1)
    deep = grow(base)
    weights, own = base.state_dict(), deep.state_dict()
    assert (deep.config.encoder_layers, deep.config.decoder_layers) == (4, 2)
    assert (base.config.encoder_layers, base.config.decoder_layers) == (2, 1)
    assert torch.equal(own["model.shared.weight"], weights["model.shared.weight"])
    for part, sources in (("encoder", (0, 0, 1, 1)), ("decoder", (0, 0))):
        for layer, source in enumerate(sources):
            name = f"model.{part}.layers.{{}}.fc1.weight"
            assert torch.equal(own[name.format(layer)], weights[name.format(source)])
    assert deep.generate(torch.tensor([[5, 6, 1]]), max_new_tokens=3).shape[0] == 1


def test_a_base_of_another_kind_is_refused(tmp_path, capsys):
    base = save_target(tiny_model("t5"), tmp_path / "t5")
    with pytest.raises(SystemExit):
        main(["--base", str(base), "--config", "none.yaml"])
    assert "not built like Marian or BART" in capsys.readouterr().err
