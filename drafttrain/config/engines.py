"""The programs that load exported drafters, a row each: what each reads and needs.

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
    loads: str
    """What of the folder it reads, in words."""
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


_PLAIN = "config.json, model.safetensors and the tokenizer of the folder"

TRANSFORMERS = Engine(
    name="transformers",
    title="Transformers alone",
    programs=("assisted",),
    loads=f"{_PLAIN}, and generation_config.json",
    language="python",
    notes="Transformers' own assisted generation: batch 1, {tokens} tokens a round, confidence "
    "threshold {confidence:g} (both in `generation_config.json`). Pass no `assistant_tokenizer`: "
    "target and drafter share one.",
)
"""Assisted generation of `generate`."""

VLLM = Engine(
    name="vllm",
    title="vLLM",
    programs=("servers", "parallel_servers"),
    loads=_PLAIN,
    notes="The target's `vocab_size` must be {vocabulary} (compare the rows of both embeddings: a "
    "family may pad them differently). Drafts are greedy unless `draft_sample_method` is "
    "`probabilistic`.",
    fixed_heads=("Qwen2ForCausalLM",),
)
"""Method draft_model. What vLLM has no code for runs in its Transformers backend."""

SGLANG = Engine(
    name="sglang",
    title="SGLang",
    programs=("servers",),
    loads=_PLAIN,
    needs_positions=True,
    needs_same_tokens=True,
)
"""Algorithm STANDALONE."""

TENSORRT_LLM = Engine(
    name="tensorrt-llm",
    title="TensorRT-LLM",
    programs=("servers", "parallel_servers"),
    loads=_PLAIN,
    notes="It does not compare tokenizers: give it no other target.",
    architectures=(
        "Cohere2ForCausalLM",
        "DeciLMForCausalLM",
        "DeepseekV3ForCausalLM",
        "Exaone4ForCausalLM",
        "Gemma3ForCausalLM",
        "Glm4MoeForCausalLM",
        "GptOssForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "NemotronForCausalLM",
        "NemotronHForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
    ),
)
"""Decoding types Draft_Target and PARD of its PyTorch backend."""

LLAMA_CPP = Engine(
    name="llama.cpp",
    title="llama.cpp",
    programs=("servers",),
    loads="a GGUF file that its own converter makes of the folder",
    notes="`convert_hf_to_gguf.py` is llama.cpp's; it refuses architectures and tokenizers that "
    "it does not know. `target.gguf` is the target, converted in the same way; `llama-quantize` "
    "makes smaller files of both. `--spec-draft-p-min` ends a "
    "draft before a token that the drafter gives less probability; 0: never. Acceptance stands in "
    "the `timings` of every answer.",
    size_difference=128,  # its own SPEC_VOCAB_MAX_SIZE_DIFFERENCE
    needs_special_tokens=True,
    fixed_heads=("Qwen2ForCausalLM",),
)
"""draft-simple of llama-server."""

ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (TRANSFORMERS, VLLM, SGLANG, TENSORRT_LLM, LLAMA_CPP)
}
"""All engines by name."""
