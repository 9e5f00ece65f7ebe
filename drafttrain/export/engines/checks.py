"""What an engine cannot take, refused before anything is written: a function for each thing.

Facts are of the engines' sources: vLLM compares the rows of both embeddings; SGLang those, the
whole vocabularies of both tokenizers, and the lengths of context; TensorRT-LLM compares nothing;
llama.cpp compares sizes, tokens from id 5 on, and the special tokens. That an id is the same token
in both is asked everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pkgutil import resolve_name

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from drafttrain.config.base import ConfigError
from drafttrain.config.engines import ENGINES, Engine
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.kinds import kind_of
from drafttrain.config.serving import GgufConfig
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
"""llama.cpp's own bound (SPEC_VOCAB_MAX_SIZE_DIFFERENCE)."""


@dataclass(frozen=True)
class Pairing:
    """A drafter and the target that it is exported for."""

    drafter: str
    """Folder or Hub name."""
    config: PretrainedConfig
    target: TargetConfig
    target_config: PretrainedConfig
    gguf: GgufConfig

    @property
    def sizes(self) -> tuple[int, int]:
        """Vocabulary of the drafter, and of the target: rows of their embeddings."""
        both = (self.config, self.target_config)
        ours, theirs = (one.get_text_config(decoder=True).vocab_size for one in both)
        return ours, theirs


def engines_for(names: Sequence[str], drafter: PretrainedConfig) -> list[Engine]:
    """The rows asked for; where none is, those that read the plain folder and take the drafter."""
    taken = {*programs(drafter)}
    if names:
        return [ENGINES[name] for name in names]
    return [one for one in ENGINES.values() if taken & {*one.programs} and one.makes is None]


def check_engines(
    names: Sequence[str],
    drafter: str,
    config: PretrainedConfig,
    target: str | None,
    gguf: GgufConfig,
) -> None:
    """Every check of every engine asked for. Raises ConfigError naming the first that fails."""
    if not names:
        return
    taken, chosen = {*programs(config)}, engines_for(names, config)
    for engine in chosen:
        if not taken & {*engine.programs}:
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
    pairing = Pairing(drafter, config, asked, check_target(asked), gguf)
    first = {check: engine for engine in reversed(chosen) for check in engine.checks}
    for engine in chosen:
        for check in engine.checks:
            if first[check] is engine:  # what several engines ask is asked once
                resolve_name(check)(pairing, engine)


def same_size(pairing: Pairing, engine: Engine) -> None:
    """As many rows in both embeddings, and both with an encoder or without one."""
    names = f"drafter {pairing.drafter!r}", f"target {pairing.target.path!r}"
    try:
        check_fit(pairing.config, pairing.target_config, *names)
    except ConfigError as error:
        raise ConfigError(f"--for {engine.name}: {error}") from None


def close_size(pairing: Pairing, engine: Engine) -> None:
    """Sizes that differ by 128 tokens at most."""
    ours, theirs = pairing.sizes
    if pairing.target_config.is_encoder_decoder or abs(ours - theirs) > LARGEST_DIFFERENCE:
        raise ConfigError(
            f"--for {engine.name}: drafter {pairing.drafter!r} has {ours} tokens and target "
            f"{pairing.target.path!r} {theirs}; {engine.title} takes decoder-only pairs that "
            f"differ by {LARGEST_DIFFERENCE} at most: give the target that it was trained for"
        )


def same_tokens(pairing: Pairing, engine: Engine) -> None:
    """An id is the same token in both tokenizers."""
    try:
        check_tokenizers(pairing.target, pairing.drafter)
    except ConfigError as error:
        raise ConfigError(f"--for {engine.name}: {error}") from None


def same_vocabulary(pairing: Pairing, engine: Engine) -> None:
    """The same tokens with the same ids in both, none in one of them alone."""
    theirs = load_tokenizer(pairing.target).get_vocab()
    ours = read_tokenizer(pairing.drafter, f"drafter {pairing.drafter!r}").get_vocab()
    strays = sorted(ours.items() ^ theirs.items(), key=lambda entry: (entry[1], entry[0]))
    if strays:
        token, index = strays[0]
        owner = "the drafter" if token in ours else "the target"
        raise ConfigError(
            f"--for {engine.name}: {engine.title} asks for the same tokens in both tokenizers, but "
            f"{token!r} ({index}) is {owner}'s alone, of {len(ours)} and {len(theirs)}; copy the "
            "target's tokenizer files into the drafter's folder"
        )


def long_enough(pairing: Pairing, engine: Engine) -> None:
    """As many positions as the target has, where both say how many."""
    both = (pairing.config, pairing.target_config)
    ours, theirs = (
        getattr(one.get_text_config(decoder=True), "max_position_embeddings", None) for one in both
    )
    if ours is not None and theirs is not None and ours < theirs:
        raise ConfigError(
            f"--for {engine.name}: drafter {pairing.drafter!r} has max_position_embeddings = "
            f"{ours}, target {pairing.target.path!r} {theirs}; {engine.title} starts no shorter "
            f"drafter: give the drafter's config.json {theirs}, where its positions are rotary, "
            f"or leave {engine.name} out"
        )


def same_special_tokens(pairing: Pairing, engine: Engine) -> None:
    """BOS and EOS, and what is put before and after a text: llama.cpp compares both."""
    theirs = _edges(load_tokenizer(pairing.target))
    ours = _edges(read_tokenizer(pairing.drafter, f"drafter {pairing.drafter!r}"))
    for name, value in ours.items():
        if value != theirs[name]:
            raise ConfigError(
                f"--for {engine.name}: the drafter's tokenizer has {name} = {value!r}, the "
                f"target's {theirs[name]!r}, and {engine.title} asks for the same; copy the "
                "target's tokenizer files into the drafter's folder"
            )


def _edges(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """BOS, EOS, and the tokens that are added before and after a text."""
    told = tokenizer(".", return_special_tokens_mask=True)
    added = list(zip(told["input_ids"], told["special_tokens_mask"], strict=True))
    before = list(takewhile(lambda one: one[1], added))
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tokens before a text": [token for token, _ in before],
        "tokens after a text": [token for token, special in added[len(before) :] if special],
    }


def known_architecture(pairing: Pairing, engine: Engine) -> None:
    """One that the engine has code for."""
    [own] = pairing.config.architectures or ["none"]
    if own not in engine.architectures:
        raise ConfigError(
            f"--for {engine.name}: {engine.title} has no code for {own!r} "
            f"({pairing.drafter!r}); give one of {', '.join(engine.architectures)}, or leave "
            f"{engine.name} out"
        )


def known_heads(pairing: Pairing, engine: Engine) -> None:
    """Heads as wide as the engine takes them to be, where it does not read `head_dim`: vLLM cuts
    the weights of attention to what it expects, without a word; llama.cpp does not load them."""
    config, [own] = pairing.config, pairing.config.architectures or ["none"]
    if own not in engine.fixed_heads:
        return
    width = config.hidden_size // config.num_attention_heads
    found = getattr(config, "head_dim", None) or width
    if found != width:
        raise ConfigError(
            f"--for {engine.name}: drafter {pairing.drafter!r} has head_dim = {found}, but "
            f"{engine.title} takes the heads of a {own!r} to be hidden_size / num_attention_heads "
            f"= {width} wide; train one without initialise.width, or leave {engine.name} out"
        )


def nothing_but_the_drafter(pairing: Pairing, engine: Engine) -> None:
    """No tensors in the drafter's files that are not its own, such as a head's: the engines' own
    loaders stop at them, or read them silently."""
    _, found = read_weights(
        auto_class(pairing.config),
        pairing.drafter,
        f"drafter {pairing.drafter!r}",
        trust_remote_code=False,
        output_loading_info=True,
    )
    strays = sorted(found["unexpected_keys"])
    if strays:
        raise ConfigError(
            f"--for {engine.name}: the weights of drafter {pairing.drafter!r} hold {strays[0]!r} "
            f"({len(strays)} tensors), no part of a {pairing.config.model_type!r} model; keep an "
            "acceptance head in a folder of its own, and give it with --head"
        )
