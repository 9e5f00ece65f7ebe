"""Loads the model of a drafter of any kind, after checking it against its target."""

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
    """Reads a drafter's config.json. Raises ConfigError if it is no drafter's, if its weights are
    not safetensors, and for what the checks of its kind refuse."""
    kinds, name = [kind for kind in KINDS.values() if kind.is_model], f"drafter {path!r}"
    for kind in kinds:
        _class_of(kind)  # importing the class registers it with AutoConfig
    settings = read_config(path, name)
    kind = kind_of(settings)
    if kind.runs_as_targets and not is_language_model(settings):
        raise ConfigError(
            f"{name} is a {settings.model_type!r} model, which cannot draft; give {in_words(kinds)}"
        )
    if kind.checks is not None:
        resolve_name(kind.checks)(settings, name)
    check_weight_files(path, name)
    return settings


def read_kind(drafter: str) -> DrafterKind:
    """Returns the kind of a drafter in settings, given by a name such as max-gram or by a model.
    Raises ConfigError like `read_drafter_settings`."""
    named = named_kind(drafter)
    return kind_of(read_drafter_settings(drafter)) if named is None else named


def check_drafter(
    path: str, target: TargetConfig, target_settings: PretrainedConfig, padded: bool = False
) -> PretrainedConfig:
    """Reads a drafter's config.json and checks that it fits the target, without reading weights.

    padded: accept embeddings of another size, if the drafter reads only tokens and its tokenizer
    shows that they are the target's. Raises ConfigError.
    """
    settings, names = read_drafter_settings(path), (f"drafter {path!r}", f"target {target.path!r}")
    kind = kind_of(settings)
    # such a drafter can run with another vocabulary size than its own (`fit_scores`)
    resizable = kind.runs_as_targets and not settings.is_encoder_decoder
    padded = padded and resizable and not lacks_embeddings(settings)
    check_fit(settings, target_settings, *names, same_size=not padded)
    sizes = vocabulary_size(settings), vocabulary_size(target_settings)
    if sizes[0] != sizes[1] and not has_tokenizer(path):
        raise ConfigError(
            f"{names[0]} has a vocabulary of {sizes[0]} tokens but {names[1]} has {sizes[1]}, and "
            "the drafter's folder has no tokenizer to show whether they are the same tokens; put "
            "the tokenizer's files there, or give a drafter of this target"
        )
    if kind.runs_as_targets or kind.recipe is None:  # others have the vocabulary of their target
        check_tokenizers(target, path)
    return settings


def vocabulary_size(settings: PretrainedConfig) -> int:
    """Returns the number of tokens that a model scores: without a mask token's own row."""
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
    """Checks by both config.json that a drafter fits a target.

    The names are those in messages. same_size: vocabularies must have the same size. Raises
    ConfigError.
    """
    kind = kind_of(drafter)
    if kind is STATE_DRAFTER:
        depth = target.get_text_config(decoder=True).num_hidden_layers
        layers = [*drafter.context_layers, *drafter.state_layers]
        if unknown := [layer for layer in layers if not -1 <= layer < depth]:
            raise ConfigError(
                f"{drafter_name} reads layer {unknown[0]} of its target, but {target_name} has "
                f"layers 0 to {depth - 1}; give the target that it was trained for"
            )
    if drafter.is_encoder_decoder != target.is_encoder_decoder:
        shape, required = f"{_shape(drafter)} ({drafter.model_type!r})", _shape(target)
        given = shape if kind.runs_as_targets else f"{kind.words} for {_shape(drafter)}"
        remedy = f"give {required} with its vocabulary as drafter"
        if kind.reads_target:
            remedy = f"train {kind.words} for this target, or give the target they were trained on"
        raise ConfigError(
            f"{drafter_name} is {given}, but {target_name} is {required} ({target.model_type!r}); "
            f"{remedy}"
        )
    drafter_size, target_size = vocabulary_size(drafter), vocabulary_size(target)
    if same_size and drafter_size != target_size:
        raise ConfigError(
            f"{drafter_name} has a vocabulary of {drafter_size} tokens but {target_name} has "
            f"{target_size}; train a drafter for this target, or give the one it was trained for"
        )
    if not reads_states(drafter):
        return
    states = "encoder" if reads_encoder(drafter) else "hidden"
    if states == "encoder":  # T5Gemma has one configuration each for encoder and decoder
        drafter, target = (getattr(one, "encoder", one) for one in (drafter, target))
    if drafter.hidden_size != (width := state_size(target, "token")):
        raise ConfigError(
            f"{drafter_name} ({kind.words}) reads {states} states of size {drafter.hidden_size}, "
            f"but those of {target_name} have size {width}; train {kind.words} for this target, or "
            "give the target of its training"
        )


def check_tokenizers(target: TargetConfig, drafter: str, name: str | None = None) -> None:
    """Raises ConfigError for the first id that means another token for drafter than for target.

    Tokens that only one of them knows are accepted, and drafters without tokenizer. `name`: the
    drafter's name in messages.
    """
    if not has_tokenizer(drafter):
        return
    name = name or f"drafter {drafter!r}"
    target_ids = load_tokenizer(target).get_vocab()
    drafter_ids = read_tokenizer(drafter, name).get_vocab()
    tokens = {index: token for token, index in target_ids.items()}
    for token, index in sorted(drafter_ids.items(), key=lambda entry: entry[1]):
        if tokens.get(index, token) != token:
            raise ConfigError(
                f"{name} and target {target.path!r} have different tokenizers: token {index} is "
                f"{token!r} ({len(drafter_ids)} tokens) in the former but {tokens[index]!r} "
                f"({len(target_ids)} tokens) in the target's; give one of the target's family"
            )


def has_tokenizer(drafter: str) -> bool:
    """Whether a drafter's folder has a tokenizer; Hub names are assumed to have one."""
    folder = Path(drafter)
    return not folder.is_dir() or any(folder.glob("tokenizer*"))


def load_drafter(
    path: str | Path,
    settings: PretrainedConfig,
    like: LoadedTarget | None = None,
    embeddings_of: str | None = None,
) -> PreTrainedModel:
    """Loads a drafter's model in eval mode, in the target's data type and on its device.

    Without a target: on the CPU, in the data type of its files. Embeddings that its folder leaves
    out are then read from `embeddings_of`, a folder or Hub name, else from the target named in its
    config.json. Raises ConfigError, also for a drafter that reads target states and was trained on
    another target.
    """
    target = None if like is None else like.model
    if target is not None and reads_states(settings):
        check_same_target(settings, target, str(path))
    loads, name = _class_of(kind_of(settings)) or auto_class(settings), f"drafter {str(path)!r}"
    options = {"dtype": "auto" if target is None else target.dtype, "trust_remote_code": False}
    model = read_whole(loads, path, name, settings, target, embeddings_of=embeddings_of, **options)
    return model.eval() if target is None else model.to(target.device).eval()


def reads_states(drafter: PretrainedConfig) -> bool:
    """Whether a drafter reads target states and so fits only the target it was trained on."""
    return kind_of(drafter).reads_target or reads_encoder(drafter)


def reads_encoder(drafter: PretrainedConfig) -> bool:
    """Whether a drafter reads the target's encoder states instead of encoding the source itself."""
    return kind_of(drafter) is SPEC_DRAFTER and shape_of(drafter).encoder == "target"


def load_checked_drafter(target: LoadedTarget, path: str) -> PreTrainedModel:
    """Loads a drafter for a loaded target after checking that it fits. Raises ConfigError."""
    settings = read_drafter_settings(path)
    check_fit(settings, target.model.config, f"drafter {path!r}", f"target {target.path!r}")
    return load_drafter(path, settings, target)


def _class_of(kind: DrafterKind) -> type[PreTrainedModel] | None:
    """Returns the class of a kind's own models; None for language models (Auto classes)."""
    return None if kind.model is None else resolve_name(kind.model)


def _shape(settings: PretrainedConfig) -> str:
    return "an encoder-decoder model" if settings.is_encoder_decoder else "a decoder-only model"
