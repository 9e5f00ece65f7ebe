"""Programs that draft with an export: what each cannot take, and the command that starts it.

Facts are of the programs' sources: vLLM compares the rows of both embeddings; SGLang those, the
vocabularies of both tokenizers and the context lengths; TensorRT-LLM compares nothing; llama.cpp
compares sizes, tokens from id 5 on, and the special tokens. Every program needs the same token
under the same id. `config/engines.py` says which of these checks each program has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePath
from pkgutil import resolve_name
from shlex import quote

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from drafttrain.config.base import ConfigError
from drafttrain.config.engines import ENGINES, Engine
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.kinds import kind_of
from drafttrain.export.parts import programs
from drafttrain.models.drafters import check_fit, check_tokenizers
from drafttrain.models.loading import (
    auto_class,
    check_target,
    load_tokenizer,
    read_tokenizer,
    read_weights,
)

LARGEST_DIFFERENCE = 128
"""llama.cpp's own bound on vocabulary sizes (SPEC_VOCAB_MAX_SIZE_DIFFERENCE)."""
Schedule = Sequence[tuple[int, int]]
"""(largest batch size, draft length), batch sizes rising: the fastest that was measured there."""


@dataclass(frozen=True)
class Pairing:
    """A drafter and the target that it is exported for."""

    drafter: str
    """Folder or Hub name."""
    config: PretrainedConfig
    target: TargetConfig
    target_config: PretrainedConfig

    @property
    def names(self) -> tuple[str, str]:
        return f"drafter {self.drafter!r}", f"target {self.target.path!r}"

    @property
    def tokenizers(self) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
        return read_tokenizer(self.drafter, self.names[0]), load_tokenizer(self.target)

    def text_settings(self, name: str) -> tuple[int | None, int | None]:
        """One entry of both text decoders' settings."""
        both = (self.config, self.target_config)
        ours, theirs = (getattr(one.get_text_config(decoder=True), name, None) for one in both)
        return ours, theirs


def engines_for(names: Sequence[str], drafter: PretrainedConfig) -> list[Engine]:
    """Those that are named; else all that can use such a drafter."""
    if names:
        return [ENGINES[name] for name in names]
    return [one for one in ENGINES.values() if {*programs(drafter)} & {*one.programs}]


def check_engines(
    names: Sequence[str], drafter: str, config: PretrainedConfig, target: str | None
) -> None:
    """Every check of every program that is named. Raises ConfigError for the first that fails."""
    if not names:
        return
    chosen = engines_for(names, config)
    for engine in chosen:
        if not {*programs(config)} & {*engine.programs}:
            raise ConfigError(
                f"--for {engine.name}: {engine.title} drafts token by token with decoder-only "
                f"language models, but drafter {drafter!r} is {kind_of(config).words} "
                f"({config.model_type!r}); leave it out"
            )
    if target is None:
        raise ConfigError(
            f"--for {','.join(names)} compares the drafter with its target, which nobody recorded; "
            "add --target MODEL"
        )
    asked = TargetConfig(path=target)
    pairing = Pairing(drafter, config, asked, check_target(asked))
    done: set[str] = set()
    for engine in chosen:
        for check in engine.checks:
            if check not in done:  # a check that several programs have is made once
                try:
                    resolve_name(check)(pairing, engine)
                except ConfigError as error:
                    raise ConfigError(f"--for {engine.name}: {error}") from None
            done.add(check)


def same_size(pairing: Pairing, engine: Engine) -> None:
    """As many rows in both embeddings, and both with an encoder or without one."""
    check_fit(pairing.config, pairing.target_config, *pairing.names)


def close_size(pairing: Pairing, engine: Engine) -> None:
    """Vocabulary sizes that differ by 128 tokens at most."""
    ours, theirs = pairing.text_settings("vocab_size")
    if pairing.target_config.is_encoder_decoder or abs(ours - theirs) > LARGEST_DIFFERENCE:
        raise ConfigError(
            f"{pairing.names[0]} has {ours} tokens and {pairing.names[1]} {theirs}; "
            f"{engine.title} takes decoder-only pairs that differ by {LARGEST_DIFFERENCE} at most: "
            "give the target that it was trained for"
        )


def same_tokens(pairing: Pairing, engine: Engine) -> None:
    """An id is the same token in both tokenizers."""
    check_tokenizers(pairing.target, pairing.drafter)


def same_vocabulary(pairing: Pairing, engine: Engine) -> None:
    """The same tokens with the same ids in both, none in one of them alone."""
    ours, theirs = (tokenizer.get_vocab() for tokenizer in pairing.tokenizers)
    strays = sorted(ours.items() ^ theirs.items(), key=lambda entry: (entry[1], entry[0]))
    if strays:
        token, index = strays[0]
        owner = "the drafter" if token in ours else "the target"
        raise ConfigError(
            f"{engine.title} needs the same tokens in both tokenizers, but {token!r} ({index}) is "
            f"{owner}'s alone, of {len(ours)} and {len(theirs)}; copy the target's tokenizer files "
            "into the drafter's folder"
        )


def long_enough(pairing: Pairing, engine: Engine) -> None:
    """As many positions as the target has, where both say how many."""
    ours, theirs = pairing.text_settings("max_position_embeddings")
    if ours is not None and theirs is not None and ours < theirs:
        raise ConfigError(
            f"{pairing.names[0]} has max_position_embeddings = {ours}, {pairing.names[1]} "
            f"{theirs}; {engine.title} starts no shorter drafter: give the drafter's config.json "
            f"{theirs}, where its positions are rotary, or leave {engine.name} out"
        )


def same_special_tokens(pairing: Pairing, engine: Engine) -> None:
    """BOS and EOS, and the tokens that are added before and after a text."""
    ours, theirs = map(_special_tokens, pairing.tokenizers)
    for name, value in ours.items():
        if value != theirs[name]:
            raise ConfigError(
                f"the drafter's tokenizer has {name} = {value!r}, the target's {theirs[name]!r}, "
                f"and {engine.title} needs the same; copy the target's tokenizer files into the "
                "drafter's folder"
            )


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    encoded = tokenizer(".", return_special_tokens_mask=True)
    added = list(zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True))
    before = list(takewhile(lambda one: one[1], added))
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tokens before a text": [token for token, _ in before],
        "tokens after a text": [token for token, special in added[len(before) :] if special],
    }


def known_architecture(pairing: Pairing, engine: Engine) -> None:
    """One that the program has code for."""
    [own] = pairing.config.architectures or ["none"]
    if own not in engine.architectures:
        raise ConfigError(
            f"{engine.title} has no code for {own!r} ({pairing.drafter!r}); give one of "
            f"{', '.join(engine.architectures)}, or leave {engine.name} out"
        )


def known_heads(pairing: Pairing, engine: Engine) -> None:
    """Heads as wide as the program takes them to be, where it does not read `head_dim`: vLLM cuts
    the weights of attention to what it expects, without a word; llama.cpp does not load them."""
    config, [own] = pairing.config, pairing.config.architectures or ["none"]
    if own not in engine.fixed_heads:
        return
    width = config.hidden_size // config.num_attention_heads
    found = getattr(config, "head_dim", None) or width
    if found != width:
        raise ConfigError(
            f"{pairing.names[0]} has head_dim = {found}, but {engine.title} takes the heads of a "
            f"{own!r} to be hidden_size / num_attention_heads = {width} wide; leave {engine.name} "
            "out"
        )


def nothing_but_the_drafter(pairing: Pairing, engine: Engine) -> None:
    """No tensors in the drafter's files that are not its own, such as a head's: the programs' own
    loaders stop at them, or read them silently."""
    _, found = read_weights(
        auto_class(pairing.config),
        pairing.drafter,
        pairing.names[0],
        trust_remote_code=False,
        output_loading_info=True,
    )
    if strays := sorted(found["unexpected_keys"]):
        raise ConfigError(
            f"the weights of {pairing.names[0]} hold {strays[0]!r} ({len(strays)} tensors), no "
            f"part of a {pairing.config.model_type!r} model; keep an acceptance head in a folder "
            "of its own, and give it with --head"
        )


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
    schedule: Schedule = ()
    """Draft lengths by batch size, where a report has them."""


def command_of(engine: Engine, serving: Serving) -> str:
    return resolve_name(engine.command)(serving)


def transformers_call(serving: Serving) -> str:
    kind = serving.auto_class
    return f"""from transformers import {kind}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{serving.target}")
target = {kind}.from_pretrained("{serving.target}")
inputs = tokenizer("...", return_tensors="pt", return_token_type_ids=False)
output = target.generate(
    **inputs, max_new_tokens=256,
    assistant_model={kind}.from_pretrained("{serving.folder}"),
)"""


def vllm_command(serving: Serving) -> str:
    fields: dict[str, object] = {
        "method": "draft_model",
        "model": serving.folder,
        "num_speculative_tokens": max([serving.tokens, *(k for _, k in serving.schedule)]),
    }
    if serving.mask_token is not None:
        fields["parallel_drafting"] = True
    if serving.schedule:
        starts = [1, *(size + 1 for size, _ in serving.schedule)]
        fields["num_speculative_tokens_per_batch_size"] = [
            [start, size, k] for start, (size, k) in zip(starts, serving.schedule, strict=False)
        ]
    return f"vllm serve {quote(serving.target)} --speculative-config {quote(json.dumps(fields))}"


def sglang_command(serving: Serving) -> str:
    return f"""python -m sglang.launch_server --model-path {quote(serving.target)} \\
    --speculative-algorithm STANDALONE --speculative-draft-model-path {quote(serving.folder)} \\
    --speculative-num-steps {serving.tokens} --speculative-eagle-topk 1 \\
    --speculative-num-draft-tokens {serving.tokens + 1}"""


def tensorrt_command(serving: Serving) -> str:
    """Its smallest batch has `max_draft_len`, which must be positive, and no batch has more; some
    PARD workers draft one length, whatever the schedule says."""
    schedule: Schedule = ()
    if serving.mask_token is None and serving.schedule and serving.schedule[0][1] > 0:
        schedule = tuple((size, min(k, serving.schedule[0][1])) for size, k in serving.schedule)
    longest = schedule[0][1] if schedule else serving.tokens
    fields = [f"max_draft_len: {longest}", f"speculative_model: {json.dumps(serving.folder)}"]
    if serving.mask_token is None:
        before, kind = ["disable_overlap_scheduler: true"], "Draft_Target"
    else:
        before, kind = [], "PARD"
        fields.append(f"mask_token_id: {serving.mask_token}")
    if schedule:
        shown = ", ".join(f"{size}: {k}" for size, k in schedule)
        fields.append(f"draft_len_schedule: {{{shown}}}")
    lines = ["cat > draft.yaml <<'END'", *before, "speculative_config:"]
    lines += [f"  {field}" for field in (f"decoding_type: {kind}", *fields)]
    return "\n".join([*lines, "END", f"trtllm-serve {quote(serving.target)} --config draft.yaml"])


def llama_command(serving: Serving) -> str:
    """llama.cpp's own converter makes the drafter's file first."""
    file = quote(str(PurePath(serving.folder) / "drafter-f16.gguf"))
    return f"""python convert_hf_to_gguf.py {quote(serving.folder)} --outtype f16 --outfile {file}
llama-server -m target.gguf -md {file} --spec-type draft-simple \\
    --spec-draft-n-max {serving.tokens} --spec-draft-p-min {serving.p_min:g}"""
