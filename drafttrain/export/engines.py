"""Inference programs that can use an exported drafter: requirements and start commands.

Taken from the programs' sources and documentation of late 2026. Every program needs identical token
ids in target and drafter; TensorRT-LLM does not check them itself. Context lengths and special
tokens are not checked here, because SGLang and llama.cpp check them at startup.
"""

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
    """The values that are filled into commands."""

    target: str
    folder: str
    """The exported folder as written in commands."""
    auto_class: str
    """The Transformers auto class that loads target and drafter."""
    tokens: int
    """Draft tokens per round."""
    confidence: float
    """Transformers' `assistant_confidence_threshold`."""
    vocabulary: int
    """Number of rows of the drafter's embedding."""
    mask_token: int | None = None
    """Mask token of a drafter that drafts a block per call (PARD), else None."""
    p_min: float = 0.0
    """llama.cpp's `--spec-draft-p-min`."""


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
    fields = {"max_draft_len": serving.tokens, "speculative_model": serving.folder}
    if serving.mask_token is None:
        settings = {"speculative_config": {"decoding_type": "Draft_Target"} | fields}
        settings["disable_overlap_scheduler"] = True
    else:
        fields["mask_token_id"] = serving.mask_token
        settings = {"speculative_config": {"decoding_type": "PARD"} | fields}
    text = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None)
    serve = f"trtllm-serve {quote(serving.target)} --config draft.yaml"
    return f"cat > draft.yaml <<'END'\n{text}END\n{serve}"


def llama_command(serving: Serving) -> str:
    """Returns the commands that convert the drafter to GGUF and start llama-server."""
    file = quote(str(PurePath(serving.folder) / "drafter-f16.gguf"))
    return f"""python convert_hf_to_gguf.py {quote(serving.folder)} --outtype f16 --outfile {file}
llama-server -m target.gguf -md {file} --spec-type draft-simple \\
    --spec-draft-n-max {serving.tokens} --spec-draft-p-min {serving.p_min:g}"""


@dataclass(frozen=True)
class ServingEngine:
    """An inference program: which drafters it can use and how it is started."""

    name: str
    """The name in settings."""
    title: str
    """The name in texts."""
    programs: tuple[Program, ...]
    """It can use a drafter whose kind lists one of them in `DrafterKind.exports`."""
    command: Callable[[Serving], str]
    notes: str = ""
    """The text below the command in model cards; {0} is the Serving."""
    needs_same_size: bool = True
    """Whether the embeddings of target and drafter must have the same number of rows."""
    families: str = ""
    """The drafter architectures that it implements, without ForCausalLM; empty: any."""
    fixed_heads: tuple[str, ...] = ()
    """Architectures whose `head_dim` it ignores and replaces by hidden_size / num_attention_heads.
    vLLM silently truncates the attention weights to that size."""


ENGINES: dict[str, ServingEngine] = {
    engine.name: engine
    for engine in (
        ServingEngine(
            "transformers",
            "Transformers alone",
            ("assisted",),
            transformers_call,
            notes="Transformers' own assisted generation: batch 1, {0.tokens} tokens per round, "
            "confidence threshold {0.confidence:g} (both in `generation_config.json`). Pass no "
            "`assistant_tokenizer`: target and drafter share one.",
        ),
        # method draft_model; vLLM runs unknown architectures in its Transformers backend
        ServingEngine(
            "vllm",
            "vLLM",
            ("servers", "parallel_servers"),
            vllm_command,
            notes="The target's `vocab_size` must be {0.vocabulary} (compare the rows of both "
            "embeddings: a family may pad them differently). Drafts are greedy unless "
            "`draft_sample_method` is `probabilistic`.",
            fixed_heads=("Qwen2ForCausalLM",),
        ),
        ServingEngine("sglang", "SGLang", ("servers",), sglang_command),  # algorithm STANDALONE
        ServingEngine(  # decoding types Draft_Target and PARD of its PyTorch backend
            "tensorrt-llm",
            "TensorRT-LLM",
            ("servers", "parallel_servers"),
            tensorrt_command,
            notes="It does not compare tokenizers: use it with this target only.",
            families="Cohere2 DeciLM DeepseekV3 Exaone4 Gemma3 Glm4Moe GptOss Llama Mistral "
            "Mixtral Nemotron NemotronH Phi3 Qwen2 Qwen3 Qwen3Moe Qwen3Next",
        ),
        ServingEngine(  # draft-simple of llama-server
            "llama.cpp",
            "llama.cpp",
            ("servers",),
            llama_command,
            notes="`convert_hf_to_gguf.py` is llama.cpp's; it refuses architectures and tokenizers "
            "that it does not know. `target.gguf` is the target, converted in the same way; "
            "`llama-quantize` makes smaller files of both. `--spec-draft-p-min` ends a draft "
            "before a token whose draft probability is lower; 0: never. The `timings` of every "
            "response contain the acceptance.",
            needs_same_size=False,
        ),
    )
}
"""All programs by name."""


def engines_for(names: Sequence[str], drafter: PretrainedConfig) -> list[ServingEngine]:
    """Returns the named programs or, without names, all that can use the drafter."""
    if names:
        return [ENGINES[name] for name in names]
    usable = set(programs(drafter))
    return [engine for engine in ENGINES.values() if not usable.isdisjoint(engine.programs)]


def check_engines(
    names: Sequence[str], drafter: str, config: PretrainedConfig, target: TargetConfig | None
) -> None:
    """Checks a drafter and its target against the requirements of every named program.

    Raises ConfigError for the first requirement that is not met.
    """
    usable = engines_for((), config)
    for name in names:
        if (engine := ENGINES[name]) not in usable:
            raise ConfigError(
                f"--for {name}: {engine.title} drafts token by token with decoder-only language "
                f"models, but drafter {drafter!r} is {kind_of(config).words} "
                f"({config.model_type!r}); leave it out"
            )
    if names and target is None:
        raise ConfigError(
            f"--for {','.join(names)} compares the drafter with its target, but the drafter's "
            "config.json names none; add --target MODEL"
        )
    for name in names:
        try:
            _check_engine(ENGINES[name], drafter, config, target)
        except ConfigError as error:
            raise ConfigError(f"--for {name}: {error}") from None


def _check_engine(
    engine: ServingEngine, drafter: str, config: PretrainedConfig, target: TargetConfig
) -> None:
    """Compares vocabulary sizes, architecture, head width (from both config.json) and tokenizers.

    Raises ConfigError for the first that does not fit.
    """
    name, target_name = f"drafter {drafter!r}", f"target {target.path!r}"
    check_fit(config, check_target(target), name, target_name, same_size=engine.needs_same_size)
    [architecture] = config.architectures or ["none"]
    known = [f"{family}ForCausalLM" for family in engine.families.split()]
    if known and architecture not in known:
        raise ConfigError(
            f"{engine.title} does not implement {architecture!r} ({name}); give one of "
            f"{', '.join(known)}, or leave {engine.name} out"
        )
    if architecture in engine.fixed_heads:
        width = config.hidden_size // config.num_attention_heads
        if (head_dim := getattr(config, "head_dim", None) or width) != width:
            raise ConfigError(
                f"{name} has head_dim = {head_dim}, but {engine.title} assumes hidden_size / "
                f"num_attention_heads = {width} for {architecture!r}; leave {engine.name} out"
            )
    check_tokenizers(target, drafter)
