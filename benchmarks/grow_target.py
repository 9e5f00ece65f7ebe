"""Make a deep encoder-decoder target of a shallow one: double its layers, then train on.

    python -m benchmarks.grow_target --base TARGET --config recipes/multi30k_target.yaml \\
        data.path=MULTI30K/train.en.gz data.reference_path=MULTI30K/train.de.gz \\
        held_out.path=MULTI30K/val.en.gz held_out.reference_path=MULTI30K/val.de.gz

A target of 6 + 6 layers takes hours of a CPU from random weights, but half an hour from a trained
one of 3 + 3 (stacking: Gong et al. 2019, "Efficient training of BERT by progressively stacking").
Shape and tokenizer are the base's, all other settings the recipe's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from drafttrain.config.inputs import TargetConfig
from drafttrain.models.language_models import spread, take_layers
from drafttrain.models.loading import check_target, load_target, load_tokenizer
from recipes import train_target as recipe

from transformers import PreTrainedModel

DEPTHS = {"model.encoder.layers.": "encoder_layers", "model.decoder.layers.": "decoder_layers"}
"""Prefixes of the layers' names in a Marian or BART model, and the configuration's field."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True, help="folder of the shallow target")
    parser.add_argument("--config", required=True, help="recipe of recipes/train_target.py")
    given, rest = parser.parse_known_args(arguments)
    base = TargetConfig(path=given.base)
    if not hasattr(check_target(base), "encoder_ffn_dim"):
        parser.error(f"--base {given.base}: not built like Marian or BART; give such a model")
    recipe.train_tokenizer = lambda *_: load_tokenizer(base)
    recipe.build_model = lambda *_: grow(load_target(base).model)
    sys.argv[1:] = ["--config", given.config, *rest]
    recipe.main()


def grow(base: PreTrainedModel) -> PreTrainedModel:
    """Returns a model with two neighbouring copies of each layer of `base`."""
    config = type(base.config).from_dict(base.config.to_dict())
    weights = base.state_dict()
    for stem, field in DEPTHS.items():
        depth = getattr(config, field)
        setattr(config, field, 2 * depth)
        weights = take_layers(weights, stem, spread(2 * depth, depth))
    config.num_hidden_layers = config.encoder_layers
    deep = type(base)(config)
    deep.load_state_dict(weights)
    return deep


if __name__ == "__main__":
    main()
