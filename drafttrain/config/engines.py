"""The programs that load exported drafters, a row each: what each needs, checks, and is told.

Written from the programs' sources and documentation as they were in late 2026. A row names
functions by dotted paths (`module:name`), which `pkgutil.resolve_name` finds: the table imports
nothing heavy.
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
    command: str
    """Function (Serving) -> what starts target and drafter, or decodes with them."""
    language: Literal["bash", "python"] = "bash"
    """Of the command."""
    notes: str = ""
    """What stands below the command in model cards, with fields of Serving in braces."""
    checks: tuple[str, ...] = ()
    """Functions (Pairing, Engine) -> None, each raising ConfigError for one thing that the program
    cannot take; asked in this order, before anything is written."""
    architectures: tuple[str, ...] = ()
    """Those of its own that it drafts with, where it has no code for others."""
    fixed_heads: tuple[str, ...] = ()
    """Architectures whose `head_dim` it does not read: heads share `hidden_size` evenly there."""


_PLAIN = "config.json, model.safetensors and the tokenizer of the folder"
_EQUAL = (
    "drafttrain.export.engines:same_size",
    "drafttrain.export.engines:same_tokens",
    "drafttrain.export.engines:nothing_but_the_drafter",
)

TRANSFORMERS = Engine(
    name="transformers",
    title="Transformers alone",
    programs=("assisted",),
    loads=f"{_PLAIN}, and generation_config.json",
    command="drafttrain.export.engines:transformers_call",
    language="python",
    notes="Transformers' own assisted generation: batch 1, {tokens} tokens a round, confidence "
    "threshold {confidence:g} (both in `generation_config.json`). Pass no `assistant_tokenizer`: "
    "target and drafter share one.",
    checks=_EQUAL,
)
"""Assisted generation of `generate`."""

VLLM = Engine(
    name="vllm",
    title="vLLM",
    programs=("servers", "parallel_servers"),
    loads=_PLAIN,
    command="drafttrain.export.engines:vllm_command",
    notes="The target's `vocab_size` must be {vocabulary} (compare the rows of both embeddings: a "
    "family may pad them differently). Drafts are greedy unless `draft_sample_method` is "
    "`probabilistic`.",
    checks=("drafttrain.export.engines:known_heads", *_EQUAL),
    fixed_heads=("Qwen2ForCausalLM",),
)
"""Method draft_model. What vLLM has no code for runs in its Transformers backend."""

SGLANG = Engine(
    name="sglang",
    title="SGLang",
    programs=("servers",),
    loads=_PLAIN,
    command="drafttrain.export.engines:sglang_command",
    checks=(
        *_EQUAL,
        "drafttrain.export.engines:same_vocabulary",
        "drafttrain.export.engines:long_enough",
    ),
)
"""Algorithm STANDALONE."""

TENSORRT_LLM = Engine(
    name="tensorrt-llm",
    title="TensorRT-LLM",
    programs=("servers", "parallel_servers"),
    loads=_PLAIN,
    command="drafttrain.export.engines:tensorrt_command",
    notes="It does not compare tokenizers: give it no other target.",
    checks=("drafttrain.export.engines:known_architecture", *_EQUAL),
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
    command="drafttrain.export.engines:llama_command",
    notes="`convert_hf_to_gguf.py` is llama.cpp's; it refuses architectures and tokenizers that "
    "it does not know. `target.gguf` is the target, converted in the same way; `llama-quantize` "
    "makes smaller files of both. `--spec-draft-p-min` ends a "
    "draft before a token that the drafter gives less probability; 0: never. Acceptance stands in "
    "the `timings` of every answer.",
    checks=(
        "drafttrain.export.engines:known_heads",
        "drafttrain.export.engines:close_size",
        "drafttrain.export.engines:same_tokens",
        "drafttrain.export.engines:same_special_tokens",
        "drafttrain.export.engines:nothing_but_the_drafter",
    ),
    fixed_heads=("Qwen2ForCausalLM",),
)
"""draft-simple of llama-server."""

ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (TRANSFORMERS, VLLM, SGLANG, TENSORRT_LLM, LLAMA_CPP)
}
"""All engines by name."""
