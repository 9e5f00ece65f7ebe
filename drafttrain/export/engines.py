"""Programs that draft with an export: what each cannot take, and the command that starts it.

Written from the programs' sources and documentation as they were in late 2026. Every program needs
the same token under the same id, and TensorRT-LLM compares nothing itself. What SGLang and
llama.cpp find out when they start (context lengths, special tokens) is left to them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from shlex import quote

import yaml
from transformers import PretrainedConfig

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.kinds import Program, kind_of
from drafttrain.export.parts import programs
from drafttrain.models.drafters import check_fit, check_tokenizers
from drafttrain.models.loading import check_target


@dataclass(frozen=True)
class Serving:
    """What commands are made of."""

    target: str
    folder: str
    """Where the export lies, as commands give it."""
    auto_class: str
    """What loads both in Transformers."""
    tokens: int
    """Draft length."""
    confidence: float
    """assistant_confidence_threshold."""
    vocabulary: int
    """Rows of the drafter's embedding."""
    mask_token: int | None = None
    """The token that stands for a mask, where one call drafts a block (PARD)."""
    p_min: float = 0.0
    """--spec-draft-p-min."""


def transformers_call(serving: Serving) -> str:
    kind = serving.auto_class
    return f"""from transformers import {kind}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{serving.target}")
target = {kind}.from_pretrained("{serving.target}")
inputs = tokenizer("...", return_tensors="pt", return_token_type_ids=False)
output = target.generate(
    **inputs, max_new_tokens=256, num_beams=1,
    assistant_model={kind}.from_pretrained("{serving.folder}"),
)"""


def vllm_command(serving: Serving) -> str:
    fields: dict[str, object] = {"method": "draft_model", "model": serving.folder}
    fields["num_speculative_tokens"] = serving.tokens
    if serving.mask_token is not None:
        fields["parallel_drafting"] = True
    return f"vllm serve {quote(serving.target)} --speculative-config {quote(json.dumps(fields))}"


def sglang_command(serving: Serving) -> str:
    return f"""python -m sglang.launch_server --model-path {quote(serving.target)} \\
    --speculative-algorithm STANDALONE --speculative-draft-model-path {quote(serving.folder)} \\
    --speculative-num-steps {serving.tokens} --speculative-eagle-topk 1 \\
    --speculative-num-draft-tokens {serving.tokens + 1}"""


def tensorrt_command(serving: Serving) -> str:
    fields: dict[str, object] = {
        "decoding_type": "Draft_Target" if serving.mask_token is None else "PARD",
        "max_draft_len": serving.tokens,
        "speculative_model": serving.folder,
    }
    settings: dict[str, object] = {"speculative_config": fields}
    if serving.mask_token is None:
        settings["disable_overlap_scheduler"] = True
    else:
        fields["mask_token_id"] = serving.mask_token
    text = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None)
    serve = f"trtllm-serve {quote(serving.target)} --config draft.yaml"
    return f"cat > draft.yaml <<'END'\n{text}END\n{serve}"


def llama_command(serving: Serving) -> str:
    """llama.cpp's own converter makes the drafter's file first."""
    file = quote(str(PurePath(serving.folder) / "drafter-f16.gguf"))
    return f"""python convert_hf_to_gguf.py {quote(serving.folder)} --outtype f16 --outfile {file}
llama-server -m target.gguf -md {file} --spec-type draft-simple \\
    --spec-draft-n-max {serving.tokens} --spec-draft-p-min {serving.p_min:g}"""


@dataclass(frozen=True)
class Engine:
    """What is known about a program that drafts with an export."""

    name: str
    """As settings have it."""
    title: str
    """As it calls itself."""
    programs: tuple[Program, ...]
    """What it is: a drafter's kind must be exportable for one of them (`DrafterKind.exports`)."""
    command: Callable[[Serving], str]
    notes: str = ""
    """What stands below the command in model cards, where {0} is the Serving."""
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
            transformers_call,
            notes="Transformers' own assisted generation: batch 1, {0.tokens} tokens a round, "
            "confidence threshold {0.confidence:g} (both in `generation_config.json`). Pass no "
            "`assistant_tokenizer`: target and drafter share one.",
        ),
        Engine(  # method draft_model; what vLLM has no code for runs in its Transformers backend
            "vllm",
            "vLLM",
            ("servers", "parallel_servers"),
            vllm_command,
            notes="The target's `vocab_size` must be {0.vocabulary} (compare the rows of both "
            "embeddings: a family may pad them differently). Drafts are greedy unless "
            "`draft_sample_method` is `probabilistic`.",
            fixed_heads=("Qwen2ForCausalLM",),
        ),
        Engine("sglang", "SGLang", ("servers",), sglang_command),  # algorithm STANDALONE
        Engine(  # decoding types Draft_Target and PARD of its PyTorch backend
            "tensorrt-llm",
            "TensorRT-LLM",
            ("servers", "parallel_servers"),
            tensorrt_command,
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
            llama_command,
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


def engines_for(names: Sequence[str], drafter: PretrainedConfig) -> list[Engine]:
    """The named programs; without names, all that can use such a drafter."""
    if names:
        return [ENGINES[name] for name in names]
    return [one for one in ENGINES.values() if {*programs(drafter)} & {*one.programs}]


def check_engines(
    names: Sequence[str], drafter: str, config: PretrainedConfig, target: TargetConfig | None
) -> None:
    """Check a drafter and its target against the needs of every named program.

    Raises ConfigError for the first that is not met.
    """
    engines = engines_for(names, config) if names else []
    for engine in engines:
        if engine not in engines_for((), config):
            raise ConfigError(
                f"--for {engine.name}: {engine.title} drafts token by token with decoder-only "
                f"language models, but drafter {drafter!r} is {kind_of(config).words} "
                f"({config.model_type!r}); leave it out"
            )
    if engines and target is None:
        raise ConfigError(
            f"--for {','.join(names)} compares the drafter with its target, which nobody recorded; "
            "add --target MODEL"
        )
    for engine in engines:
        try:
            _check_engine(engine, drafter, config, target)
        except ConfigError as error:
            raise ConfigError(f"--for {engine.name}: {error}") from None


def _check_engine(
    engine: Engine, drafter: str, config: PretrainedConfig, target: TargetConfig
) -> None:
    """By both config.json: size of vocabularies, architecture, width of heads; and tokenizers."""
    name, target_name = f"drafter {drafter!r}", f"target {target.path!r}"
    check_fit(config, check_target(target), name, target_name, same_size=engine.needs_same_size)
    [own] = config.architectures or ["none"]
    if engine.architectures and own not in engine.architectures:
        raise ConfigError(
            f"{engine.title} has no code for {own!r} ({name}); give one of "
            f"{', '.join(engine.architectures)}, or leave {engine.name} out"
        )
    if own in engine.fixed_heads:
        width = config.hidden_size // config.num_attention_heads
        if (found := getattr(config, "head_dim", None) or width) != width:
            raise ConfigError(
                f"{name} has head_dim = {found}, but {engine.title} takes the heads of a {own!r} "
                f"to be hidden_size / num_attention_heads = {width} wide; leave {engine.name} out"
            )
    check_tokenizers(target, drafter)
