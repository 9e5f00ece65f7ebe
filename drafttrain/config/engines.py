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
    needs_same_size: bool = True
    """Whether both embeddings must have as many rows."""
    architectures: tuple[str, ...] = ()
    """Those of its own that it drafts with, where it has no code for others."""
    fixed_heads: tuple[str, ...] = ()
    """Architectures whose `head_dim` it does not read: heads share `hidden_size` evenly there, and
    vLLM cuts the weights of attention to that without a word."""


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
        Engine("sglang", "SGLang", ("servers",)),  # algorithm STANDALONE
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
            needs_same_size=False,
        ),
    )
}
"""All engines by name."""
