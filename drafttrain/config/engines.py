"""The programs that load exported drafters, a row each: what each needs.

Written from the programs' sources and documentation as they were in late 2026. `export/engines.py`
checks what a row says, and has the commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drafttrain.config.kinds import Program


@dataclass(frozen=True)
class Engine:
    """What is known about a program that drafts with an export."""

    name: str
    """As settings have it."""
    title: str
    """As it calls itself."""
    programs: tuple[Program, ...]
    """What it is: a drafter's kind must be exportable for one of them (`DrafterKind.exports`)."""
    language: Literal["bash", "python"] = "bash"
    """Of its command."""
    notes: str = ""
    """What stands below the command in model cards, with fields of Serving in braces."""
    size_difference: int = 0
    """How far the sizes of both vocabularies may differ."""
    needs_positions: bool = False
    """Whether the drafter must have as many positions as the target."""
    needs_same_tokens: bool = False
    """Whether neither tokenizer may have a token that the other one lacks."""
    needs_special_tokens: bool = False
    """Whether both tokenizers must have the same special tokens and add the same ones."""
    architectures: tuple[str, ...] = ()
    """Those of its own that it drafts with, where it has no code for others."""
    fixed_heads: tuple[str, ...] = ()
    """Architectures whose `head_dim` it does not read: heads share `hidden_size` evenly there. vLLM
    cuts the weights of attention to that without a word; llama.cpp does not load them."""


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "transformers",
            "Transformers alone",
            ("assisted",),
            language="python",
            notes="Transformers' own assisted generation: batch 1, {tokens} tokens a round, "
            "confidence threshold {confidence:g} (both in `generation_config.json`). Pass no "
            "`assistant_tokenizer`: target and drafter share one.",
        ),
        Engine(  # method draft_model; what vLLM has no code for runs in its Transformers backend
            "vllm",
            "vLLM",
            ("servers", "parallel_servers"),
            notes="The target's `vocab_size` must be {vocabulary} (compare the rows of both "
            "embeddings: a family may pad them differently). Drafts are greedy unless "
            "`draft_sample_method` is `probabilistic`.",
            fixed_heads=("Qwen2ForCausalLM",),
        ),
        Engine(  # algorithm STANDALONE
            "sglang", "SGLang", ("servers",), needs_positions=True, needs_same_tokens=True
        ),
        Engine(  # decoding types Draft_Target and PARD of its PyTorch backend
            "tensorrt-llm",
            "TensorRT-LLM",
            ("servers", "parallel_servers"),
            notes="It does not compare tokenizers: give it no other target.",
            architectures=tuple(
                f"{family}ForCausalLM"
                for family in (
                    "Cohere2 DeciLM DeepseekV3 Exaone4 Gemma3 Glm4Moe GptOss Llama Mistral Mixtral "
                    "Nemotron NemotronH Phi3 Qwen2 Qwen3 Qwen3Moe Qwen3Next"
                ).split()
            ),
        ),
        Engine(  # draft-simple of llama-server
            "llama.cpp",
            "llama.cpp",
            ("servers",),
            notes="`convert_hf_to_gguf.py` is llama.cpp's; it refuses architectures and tokenizers "
            "that it does not know. `target.gguf` is the target, converted in the same way; "
            "`llama-quantize` makes smaller files of both. `--spec-draft-p-min` ends a draft "
            "before a token that the drafter gives less probability; 0: never. Acceptance stands "
            "in the `timings` of every answer.",
            size_difference=128,  # its own SPEC_VOCAB_MAX_SIZE_DIFFERENCE
            needs_special_tokens=True,
            fixed_heads=("Qwen2ForCausalLM",),
        ),
    )
}
"""All engines by name."""
