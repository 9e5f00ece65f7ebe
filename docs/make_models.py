"""Tests every language model class of Transformers in the engine and writes docs/models.md.

    python docs/make_models.py [--only LlamaForCausalLM,...] [--jobs 2] [--seconds 120]

A tiny random model of each causal, encoder-decoder and speech class of the installed Transformers
is loaded like any target. Sequences of unequal lengths are decoded in one batch. Logits of trees
and chains are compared with separate forward passes of each path, and outputs of plain and
speculative decoding with `generate`. Each class runs in its own process, so that a crash affects
only that class.
"""

from __future__ import annotations

import argparse
import inspect
import multiprocessing
import os
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.architectures import (
    check_configuration,
    encoder_width,
)
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.probe import reference_logits
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Proposal, Sampling, Source
from drafttrain.decoding.verifiers import make_verifier

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

PAGE = Path(__file__).with_name("models.md")
MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
)
SPEECH = modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
VOCABULARY, LENGTHS, NEW_TOKENS, LARGEST = 100, (7, 4), 12, 20_000_000
TREE, CHAIN = torch.tensor([-1, 0, 0, 1]), torch.arange(-1, 3)
EXACT, SINGLE = 1e-9, 1e-4
"""Largest allowed difference of logits, relative to the largest logit: for models that compute in
float64 throughout, and for those with a part in float32."""
OUTCOMES = {
    "works": "Trees, chains and batches of unequal sequences.",
    "chains only": "One sequence per call, no trees: the class makes its own masks or positions.",
    "refused": "With the reason that the error gives, when the model is loaded.",
    "not tried": "No tiny model of the class could be built, or it does not run by itself.",
    "wrong": "To be mended: taken at load, but the outputs are not the model's own.",
    "error": "To be mended: an error that names no reason.",
}
TINY: dict[str, object] = {
    name: value
    for value, names in (
        (VOCABULARY, "vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size"),
        (VOCABULARY, "vocab_size_per_layer_input unpadded_vocab_size"),
        (0, "pad_token_id"),
        (1, "bos_token_id"),
        (2, "eos_token_id decoder_start_token_id"),
        (64, "max_position_embeddings n_positions n_ctx max_target_positions max_seq_len"),
        (64, "max_source_positions max_text_positions original_max_position_embeddings"),
        (64, "max_encoder_position_embeddings max_decoder_position_embeddings"),
        (32, "hidden_size d_model n_embd emb_dim embedding_size embedding_dim word_embed_proj_dim"),
        (32, "output_dim out_hidden_size input_embedding_size output_embedding_size"),
        (32, "cross_hidden_size cross_attention_hidden_size attention_hidden_size lru_width"),
        (32, "index_topk_dim projector_hidden_size encoder_hidden_size"),
        (48, "intermediate_size d_ff ffn_dim dim_ff dff d_inner ffn_hidden_size n_inner"),
        (48, "encoder_ffn_dim decoder_ffn_dim moe_intermediate_size expert_ffn_hidden_size"),
        (48, "shared_expert_intermediate_size shared_intermediate_size intermediate_size_mlp"),
        (48, "moe_shared_expert_intermediate_size shared_experts_intermediate_size hidden_dim"),
        (48, "dense_intermediate_size feed_forward_size mlp_dim speech_encoder_intermediate_size"),
        (2, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth"),
        (2, "num_encoder_layers num_decoder_layers speech_encoder_layers num_blocks"),
        (2, "conf_num_hidden_layers t2u_encoder_layers t2u_decoder_layers"),
        (4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads"),
        (4, "decoder_attention_heads attention_heads num_encoder_attention_heads"),
        (4, "num_decoder_attention_heads cross_num_attention_heads swa_num_attention_heads"),
        (4, "speech_encoder_attention_heads"),
        (2, "num_key_value_heads num_kv_heads cross_num_key_value_heads"),
        (2, "swa_num_key_value_heads linear_num_key_heads index_n_heads"),
        (4, "linear_num_value_heads linear_num_heads"),
        (8, "head_dim d_kv v_head_dim qk_nope_head_dim qk_rope_head_dim index_head_dim d_head"),
        (8, "dim_head kv_channels cross_head_dim swa_head_dim linear_key_head_dim rotary_dim"),
        (8, "linear_value_head_dim linear_head_dim attention_head_size global_head_dim"),
        (16, "qk_head_dim kv_lora_rank q_lora_rank o_lora_rank d_rel laurel_rank"),
        (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
        (2, "num_experts_per_tok moe_topk moe_k num_selected_experts top_k_experts"),
        (1, "n_group topk_group n_shared_experts first_k_dense_replace zero_expert_num"),
        (1, "num_kv_shared_layers moe_layer_end_index max_window_layers"),
        (5, "sliding_window sliding_window_size window_size_swa local_attention"),
        (8, "attention_chunk_size hidden_size_per_layer_input query_pre_attn_scalar"),
        (8, "num_mel_bins mamba_d_state state_size mamba_d_head mamba_headdim ssm_state_size"),
    )
    for name in names.split()
}
"""Sizes of tiny models, by names in configurations."""
SHARED = {
    "layer_types": 2 * ["sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "intermediate_size": 48,
}
"""For families whose last layers use the keys and values of other layers."""
SPECIAL: dict[str, dict[str, object]] = {
    "gemma3n_text": SHARED | {"activation_sparsity_pattern": 4 * [0.0]},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), SHARED),
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "led": {"attention_window": [4, 4]},  # sources are padded to it
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "moshi": {"sliding_window": 64},  # for longer texts its cache and mask disagree
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    "xmod": {"default_language": "en_XX"},
}
"""Additional settings of single families, by model type."""


@dataclass
class Outcome:
    kind: str
    """A key of `OUTCOMES`."""
    reason: str = ""
    worst: float = 0.0
    """Largest difference from the logits of a separate forward pass, relative to the largest."""


def classes() -> dict[str, list[str]]:
    """Returns the model types of each class in the mappings."""
    found: dict[str, list[str]] = {}
    for mapping in MAPPINGS:
        for model_type, name in getattr(modeling_auto, mapping).items():
            types = found.setdefault(name, [])
            if model_type not in types:
                types.append(model_type)
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def tiny_config(default: PretrainedConfig, role: str = "") -> PretrainedConfig:
    """Returns a configuration of the same class with small sizes and one layer of each kind.

    role: its name in another configuration.
    """
    kind, own = type(default), vars(default)
    fields = inspect.signature(kind.__init__).parameters
    settings = {
        name: TINY[name]
        for name in fields
        if name in TINY and (own.get(name) is not None or name == "head_dim")
    }
    heads, grouped = own.get("num_attention_heads"), own.get("num_key_value_heads")
    if "num_key_value_heads" in fields and grouped in (None, heads):
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    for name in kind.sub_configs:
        if isinstance(own.get(name), PretrainedConfig):
            settings[name] = tiny_config(own[name], name).to_dict()
    layers, size = own.get("num_hidden_layers"), settings.get("num_hidden_layers", 0)
    lists = {name: own[name] for name in fields if isinstance(own.get(name), (list, tuple))}
    kinds = {name: distinct(given) for name, given in lists.items() if len(given) == layers}
    if kinds:
        settings["num_hidden_layers"] = size = max(size, *map(len, kinds.values()))
        settings |= {name: (some * size)[:size] for name, some in kinds.items()}
    if "is_decoder" in fields:
        settings["is_decoder"] = role != "encoder"
    if "add_cross_attention" in fields:
        settings["add_cross_attention"] = role == "decoder"
    return kind(**(settings | SPECIAL.get(kind.model_type, {})))


def distinct(values: Sequence[object]) -> list[object]:
    return [one for i, one in enumerate(values) if one not in values[:i]]


def tiny_model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a random model of a class in eval mode. Raises what the class raises."""
    kind = getattr(transformers, name)
    config = tiny_config(kind.config_class())
    with torch.device("meta"):
        size = sum(weight.numel() for weight in kind._from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"its smallest model here has {size / 1e6:.0f} M weights")
    torch.manual_seed(0)
    model = kind._from_config(config, dtype=dtype).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)  # so that rows differ
    own = model.generation_config
    own.pad_token_id, own.bos_token_id, own.eos_token_id = 0, 1, 2
    if model.config.is_encoder_decoder:
        own.decoder_start_token_id = 2
    own.forced_bos_token_id = own.forced_eos_token_id = None
    return model


def try_class(name: str) -> Outcome:
    """Tests a class in the engine, in float64 or, if that fails, in float32."""
    kind = getattr(transformers, name)
    try:
        check_configuration(kind.config_class(), kind)
    except ValueError as error:
        return Outcome("refused", reason_of(error))
    except Exception as error:  # a class without a default configuration
        return Outcome("not tried", reason_of(error))
    for dtype in (torch.float64, torch.float32):
        try:
            model = tiny_model(name, dtype)
        except Exception as error:
            return Outcome("not tried", reason_of(error))
        outcome = try_model(model)
        if outcome.kind in ("works", "chains only"):
            return outcome
    return outcome


def try_model(model: PreTrainedModel) -> Outcome:
    """Loads a model into the engine and compares its outputs with the model's forward pass."""
    try:
        target = CachedModel(model)
    except ValueError as error:
        return Outcome("refused", reason_of(error))
    except Exception as error:
        return Outcome("error", reason_of(error))
    try:
        sources = sources_of(model)
        if not reads_text(model, sources[0]):
            return Outcome("not tried", "the tiny model's output does not depend on earlier tokens")
        worst = largest_difference(target, sources)
        fault = fault_of_tokens(target, sources)
    except Exception as error:
        return Outcome("error", reason_of(error))
    if fault or not worst <= SINGLE:
        return Outcome("wrong", fault or f"logits differ by {worst:.0e}", worst)
    kind = "works" if target.supports_tree_attention else "chains only"
    return Outcome(kind, target.tree_fault or "", worst)


def sources_of(model: PreTrainedModel) -> list[Source]:
    """Returns random texts of unequal lengths; for speech, random encoder states."""
    generator = torch.Generator().manual_seed(1)
    sources = []
    for length in LENGTHS:
        source = make_source(torch.randint(5, VOCABULARY, (length,), generator=generator), model)
        if takes_audio(model):
            states = torch.randn(length, encoder_width(model), generator=generator)
            source = replace(source, encoded=states.to(model.dtype))
        sources.append(source)
    return sources


def takes_audio(model: PreTrainedModel) -> bool:
    """Whether the encoder reads audio."""
    return model.config.is_encoder_decoder and type(model).__name__ in SPEECH.values()


@torch.inference_mode()
def reads_text(model: PreTrainedModel, source: Source) -> bool:
    """Whether the logits depend on earlier tokens; otherwise a comparison shows nothing."""
    ids = torch.arange(5, 13)
    found, other = (
        reference_logits(model, source, torch.cat([source.prefix, tokens]))[-1]
        for tokens in (ids, ids.index_fill(0, torch.tensor([6]), 40))
    )
    return bool((found - other).abs().max() > SINGLE * found.abs().max())


@torch.inference_mode()
def largest_difference(target: CachedModel, sources: Sequence[Source]) -> float:
    """Returns the largest difference of two trees and a chain from separate forward passes.

    After each draft a path is kept in the cache.
    """
    generator, worst = torch.Generator().manual_seed(2), 0.0
    states, tokens = target.encode_all(sources), [source.prefix for source in sources]
    for tree, path in ((TREE, [0, 1, 3]), (TREE, [0, 2]), (CHAIN, [0])):
        parents = tree if target.supports_tree_attention else CHAIN
        path = path if target.supports_tree_attention else [0, 1]
        drafts = [
            Proposal(torch.randint(5, VOCABULARY, (4,), generator=generator), parents)
            for _ in states
        ]
        outputs = target.score([*zip(states, tokens, drafts, strict=True)])
        for source, own, draft, output in zip(sources, tokens, drafts, outputs, strict=True):
            for node in range(-1, 4):
                nodes = path_to(node, parents)
                whole = torch.cat([own, draft.tokens[nodes]])
                expected = reference_logits(target.model, source, whole)[-1]
                differs = (output.logits[node + 1] - expected).abs().max() / expected.abs().max()
                worst = max(worst, float(differs.nan_to_num(torch.inf)))
        for i, state in enumerate(states):
            target.keep(state, torch.tensor(path))
            tokens[i] = torch.cat([tokens[i], drafts[i].tokens[path], drafts[i].tokens[:1]])
    return worst


def path_to(node: int, parents: Tensor) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path, node = [node, *path], int(parents[node])
    return path


def fault_of_tokens(target: CachedModel, sources: Sequence[Source]) -> str:
    """Returns how plain or speculative greedy decoding differs from `generate`; empty if equal."""
    greedy = fresh_greedy if takes_audio(target.model) else generated
    expected = [greedy(target.model, source) for source in sources]
    for name, drafter in (("plain", NoDrafter()), ("speculative", MaxGramDrafter())):
        decoder = Decoder(
            target,
            drafter,
            FixedLength(3),
            make_verifier("greedy"),
            Sampling(),
            lambda row: sequence_randomness(0, row),
        )
        found = [output.tokens for output in decoder.decode_all(sources, NEW_TOKENS, 2)]
        if found != expected:
            return f"{name} decoding gives {found}, generate {expected}"
    return ""


@torch.inference_mode()
def generated(model: PreTrainedModel, source: Source) -> list[int]:
    ids = source.input_ids[None]
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    found = model.generate(input_ids=ids, max_new_tokens=NEW_TOKENS, **given)
    return found[0, len(source.prefix) :].tolist()


@torch.inference_mode()
def fresh_greedy(model: PreTrainedModel, source: Source) -> list[int]:
    """Decodes greedily with separate forward passes, as `generate` would need audio."""
    tokens, end = source.prefix, model.generation_config.eos_token_id
    for _ in range(NEW_TOKENS):
        tokens = torch.cat([tokens, reference_logits(model, source, tokens)[-1:].argmax(dim=-1)])
        if tokens[-1] == end:
            break
    return tokens[len(source.prefix) :].tolist()


def reason_of(error: Exception) -> str:
    """Returns the reason of a refusal, or the error, in one line."""
    text = " ".join(str(error).split())
    refusal = re.search(r"cannot be decoded speculatively: (.*); families with a plain", text)
    return (refusal[1] if refusal else f"{type(error).__name__}: {text}")[:200]


def try_apart(name: str, seconds: float) -> Outcome:
    """Runs `try_class` in a separate process, which is killed after `seconds`."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = FORK.Process(target=lambda: there.send(try_class(name)))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(seconds) else Outcome("error", f"no result in {seconds} s")
    except EOFError:
        process.join()
        return Outcome("error", f"the process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


FORK = multiprocessing.get_context("fork")


def page(outcomes: dict[str, Outcome], types: dict[str, list[str]]) -> str:
    """Returns the page: numbers of classes by outcome, then a table for each outcome."""
    counts = Counter(outcome.kind for outcome in outcomes.values())
    lines = [
        f"{HEAD}\n\ntorch {torch.__version__.partition('+')[0]}, "
        f"Transformers {transformers.__version__}, {len(outcomes)} classes:\n",
        "| outcome | classes | |\n| --- | ---: | --- |",
        *(f"| {kind} | {counts[kind]} | {OUTCOMES[kind]} |" for kind in OUTCOMES if counts[kind]),
    ]
    for kind in (kind for kind in OUTCOMES if counts[kind]):
        last = "largest difference" if kind == "works" else "reason"
        lines += [
            f"\n## {kind.capitalize()}\n",
            f"| class | model type | {last} |",
            "| --- | --- | --- |",
        ]
        for name, outcome in outcomes.items():
            if outcome.kind == kind:
                reason = outcome.reason.replace("|", "\\|") or f"{outcome.worst:.0e}"
                lines.append(f"| {name} | {', '.join(types[name])} | {reason} |")
    return "\n".join(lines) + "\n"


HEAD = """# Models

The classes of Transformers that the engine supports. Written by `make families` (`python
docs/make_models.py`), which loads a tiny random model of each causal, encoder-decoder and speech
class and decodes sequences of unequal lengths in batches. Logits of draft trees and chains are
compared with separate forward passes of each path, and outputs of plain and speculative decoding
with `generate`. The largest difference is relative to the largest logit; it is up to 1e-4 for
classes that compute parts in float32.
Speech models are tested with random encoder states; audio clips are supported for Whisper."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=lambda text: text.split(","), help="only these classes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="classes at once")
    parser.add_argument("--seconds", type=float, default=120, help="limit for one class")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    given = parser.parse_args(arguments)
    types = classes()
    names = given.only or list(types)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    outcomes: dict[str, Outcome] = {}
    with ThreadPoolExecutor(given.jobs) as pool:
        tries = pool.map(lambda name: try_apart(name, given.seconds), names)
        for name, outcome in zip(names, tries, strict=True):
            outcomes[name] = outcome
            print(f"{name}: {outcome.kind} {outcome.reason or f'{outcome.worst:.0e}'}", flush=True)
    given.out.write_text(page(outcomes, types), encoding="utf-8")


if __name__ == "__main__":
    main()
