"""Load a drafter's model, of any kind that is one, checked against its target first."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.kinds import (
    KINDS,
    SPEC_DRAFTER,
    STATE_DRAFTER,
    DrafterKind,
    in_words,
    kind_of,
    named_kind,
)
from drafttrain.models.draft_states import state_size
from drafttrain.models.identity import check_same_target
from drafttrain.models.loading import (
    LoadedTarget,
    auto_class,
    is_language_model,
    load_tokenizer,
    read_config,
    read_tokenizer,
)
from drafttrain.models.spec_drafter.shape import shape_of
from drafttrain.models.target_embeddings import lacks_embeddings, read_whole
from drafttrain.models.weight_files import check_weight_files


def read_drafter_settings(path: str) -> PretrainedConfig:
    """The drafter's config.json.

    Raises ConfigError where there is none, it is no drafter's, or its weights are no safetensors,
    and as its kind's checks.
    """
    kinds = [kind for kind in KINDS.values() if kind.is_model]
    for kind in kinds:
        _class_of(kind)  # what is imported is known to AutoConfig
    settings = read_config(path, f"drafter {path!r}")
    kind = kind_of(settings)
    if kind.runs_as_targets and not is_language_model(settings):
        raise ConfigError(
            f"drafter {path!r} is a {settings.model_type!r} model, which drafts nothing; give "
            f"{in_words(kinds)}"
        )
    if kind.checks is not None:
        resolve_name(kind.checks)(settings, f"drafter {path!r}")
    check_weight_files(path, f"drafter {path!r}")
    return settings


def read_kind(drafter: str) -> DrafterKind:
    """The kind of the drafter that settings name: by its name, else by its config.json.

    Raises ConfigError as `read_drafter_settings`.
    """
    named = named_kind(drafter)
    return kind_of(read_drafter_settings(drafter)) if named is None else named


def check_drafter(
    path: str, target: TargetConfig, target_settings: PretrainedConfig, padded: bool = False
) -> PretrainedConfig:
    """The drafter's settings, fit for the target's, before any weights are read.

    padded: embeddings of other sizes will do, where the drafter reads tokens alone and its
    tokenizer shows that they are the target's. Raises ConfigError as `read_drafter_settings`,
    `check_fit` and `check_tokenizers`.
    """
    settings, names = read_drafter_settings(path), (f"drafter {path!r}", f"target {target.path!r}")
    padded = padded and reads_tokens_alone(settings)
    check_fit(settings, target_settings, *names, same_size=not padded)
    sizes = vocabulary_size(settings), vocabulary_size(target_settings)
    if sizes[0] != sizes[1] and not has_tokenizer(path):
        raise ConfigError(
            f"{names[0]} has a vocabulary of {sizes[0]} tokens but {names[1]} has {sizes[1]}, and "
            "no tokenizer lies beside the drafter to tell whether they are the same ones; put the "
            "tokenizer's files there, or give a drafter of this target"
        )
    if not kind_of(settings).for_one_target:
        check_tokenizers(target, path)
    return settings


def reads_tokens_alone(drafter: PretrainedConfig) -> bool:
    """Whether it is a decoder-only language model that reads nothing of its target's: such models
    run with as many tokens as the target has (`fit_scores`)."""
    return (
        kind_of(drafter).runs_as_targets
        and not drafter.is_encoder_decoder
        and not reads_states(drafter)
        and not lacks_embeddings(drafter)
    )


def vocabulary_size(settings: PretrainedConfig) -> int:
    """Tokens that a model gives scores: rows of its decoder's embedding, but for a mask's own."""
    if kind_of(settings) is SPEC_DRAFTER:
        return shape_of(settings).vocab_size
    return settings.get_text_config(decoder=True).vocab_size


def check_fit(
    drafter: PretrainedConfig,
    target: PretrainedConfig,
    drafter_name: str,
    target_name: str,
    same_size: bool = True,
) -> None:
    """Whether a drafter could draft for a target, by both config.json alone.

    The names are what messages call them; same_size: vocabularies must be as large. Raises
    ConfigError where only one of the two has an encoder, where their vocabularies, or the states
    that the drafter reads, differ in size, and for layers to read that the target has not.
    """
    kind = kind_of(drafter)
    if kind is STATE_DRAFTER:
        depth = target.get_text_config(decoder=True).num_hidden_layers
        read = [*drafter.context_layers, *drafter.state_layers]
        if strays := [layer for layer in read if not -1 <= layer < depth]:
            raise ConfigError(
                f"{drafter_name} reads layer {strays[0]} of its target, but {target_name} has "
                f"layers 0 to {depth - 1}; give the target that it was trained for"
            )
    if drafter.is_encoder_decoder != target.is_encoder_decoder:
        shape, wanted = f"{_shape(drafter)} ({drafter.model_type!r})", _shape(target)
        found = shape if kind.runs_as_targets else f"{kind.words} for {_shape(drafter)}"
        remedy = f"give {wanted} with its vocabulary as drafter"
        if kind.reads_target:
            remedy = f"train {kind.words} for this target, or give the target they were trained on"
        raise ConfigError(
            f"{drafter_name} is {found}, but {target_name} is {wanted} ({target.model_type!r}); "
            f"{remedy}"
        )
    drafter_size, target_size = vocabulary_size(drafter), vocabulary_size(target)
    if same_size and drafter_size != target_size:
        raise ConfigError(
            f"{drafter_name} has a vocabulary of {drafter_size} tokens but {target_name} has "
            f"{target_size}; train a drafter for this target, or give the target that the drafter "
            "was trained for"
        )
    if reads_encoder(drafter) and drafter.hidden_size != target.hidden_size:
        raise ConfigError(
            f"{drafter_name} ({kind.words}) reads states of the target's encoder, "
            f"{drafter.hidden_size} numbers each, but {target_name} has {target.hidden_size}; "
            f"train {kind.words} for this target, or give the target it was trained on"
        )
    width = state_size(target, "token")
    reads = drafter.hidden_size if kind.reads_target else getattr(drafter, "state_width", None)
    if reads not in (None, width):
        raise ConfigError(
            f"{drafter_name} ({kind.words}) reads {reads} numbers a token, but the "
            f"last hidden state of {target_name} has {width}; train {kind.words} for this target, "
            "or give the target they were trained on"
        )


def check_tokenizers(target: TargetConfig, drafter: str, name: str | None = None) -> None:
    """An id must be the same token in both, where the drafter has a tokenizer beside it.

    Tokens that only one of them knows do no harm; `name` is what messages call the drafter. Raises
    ConfigError naming the first difference.
    """
    name = name or f"drafter {drafter!r}"
    if not has_tokenizer(drafter):
        return
    ours = load_tokenizer(target).get_vocab()
    theirs = read_tokenizer(drafter, name).get_vocab()
    tokens = {index: token for token, index in ours.items()}
    for token, index in sorted(theirs.items(), key=lambda entry: entry[1]):
        if tokens.get(index, token) != token:
            raise ConfigError(
                f"{name} and target {target.path!r} have different tokenizers: token {index} is "
                f"{token!r} ({len(theirs)} tokens) in the former but {tokens[index]!r} "
                f"({len(ours)} tokens) in the target's; give one of the target's family"
            )


def has_tokenizer(drafter: str) -> bool:
    """Whether a tokenizer lies beside a drafter; names on the Hub have one."""
    folder = Path(drafter)
    return not folder.is_dir() or any(folder.glob("tokenizer*"))


def load_drafter(
    path: str | Path,
    settings: PretrainedConfig,
    like: LoadedTarget | None = None,
    embeddings_of: str | None = None,
) -> PreTrainedModel:
    """The drafter's model in eval mode, of the target's type and on its device.

    Without a target: on the CPU, in the type that its file holds; embeddings that it lacks are read
    from those of embeddings_of, a folder or Hub name, else of the target that it names. Raises
    ConfigError, also where the drafter reads a target's states and was trained on another target.
    """
    kind = kind_of(settings)
    if like is not None and reads_states(settings):
        check_same_target(settings, like.model, str(path))
    dtype = "auto" if like is None else like.model.dtype
    loads = _class_of(kind) or auto_class(settings)
    name = f"drafter {str(path)!r}"
    options = {"dtype": dtype, "trust_remote_code": False}
    target = None if like is None else like.model
    model = read_whole(loads, path, name, settings, target, place=embeddings_of, **options)
    return model.eval() if like is None else model.to(like.model.device).eval()


def reads_states(drafter: PretrainedConfig) -> bool:
    """Whether it drafts from states of the target that it was trained on, and of no other."""
    reads = kind_of(drafter).reads_target or reads_encoder(drafter)
    fed = getattr(drafter, "state_width", None) is not None
    return reads or fed


def reads_encoder(drafter: PretrainedConfig) -> bool:
    """Whether it reads what the target's encoder puts out, instead of a source of its own."""
    return kind_of(drafter) is SPEC_DRAFTER and shape_of(drafter).encoder == "target"


def load_drafter_beside(target: LoadedTarget, path: str) -> PreTrainedModel:
    """A drafter for a loaded target, checked against it first. Raises ConfigError."""
    settings = read_drafter_settings(path)
    check_fit(settings, target.model.config, f"drafter {path!r}", f"target {target.path!r}")
    return load_drafter(path, settings, target)


def _class_of(kind: DrafterKind) -> type[PreTrainedModel] | None:
    """The class of a kind's own models; None: language models have Auto classes."""
    return None if kind.model is None else resolve_name(kind.model)


def _shape(settings: PretrainedConfig) -> str:
    return "an encoder-decoder model" if settings.is_encoder_decoder else "a decoder-only model"
