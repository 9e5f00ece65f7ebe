"""From which target size on would a drafter pay? A larger target of random weights answers.

    python benchmarks/random_target.py --target SMOLLM2 --width 2048 --layers 24 --heads 32 \\
        --kv-heads 32 --feed-forward 8192 --out larger
    python llama.cpp/convert_hf_to_gguf.py larger --outtype f16 --outfile larger.gguf
    drafttrain bench --target SMOLLM2 --data prompts.jsonl --llama-server llama-server \\
        --model larger.gguf --draft-model drafter-q8_0.gguf llama.n_max=2 \\
        "llama.draft_arguments=--spec-synth-rates 0.40,0.17"

Tokens, tokenizer and family are the target's, so that its drafter fits. What the weights say does
not matter where the server accepts as often as it is told (synthetic acceptance): calls take what
they would take.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from drafttrain.models.loading import read_config


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="folder or Hub name of the real one")
    parser.add_argument("--width", type=int, required=True, help="hidden size")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--kv-heads", type=int, required=True)
    parser.add_argument("--feed-forward", type=int, required=True, help="intermediate size")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    given = parser.parse_args()
    if given.out.exists():
        parser.error(f"{str(given.out)!r} exists; give the name of a new folder")
    config = read_config(given.target, f"target {given.target!r}")
    config.hidden_size, config.num_hidden_layers = given.width, given.layers
    config.num_attention_heads, config.num_key_value_heads = given.heads, given.kv_heads
    config.intermediate_size, config.head_dim = given.feed_forward, given.width // given.heads
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    model.generation_config = GenerationConfig.from_pretrained(given.target)
    model.save_pretrained(given.out)
    AutoTokenizer.from_pretrained(given.target).save_pretrained(given.out)
    print(f"{given.out}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
