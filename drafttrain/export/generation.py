"""`generate` for Transformers' `custom_generate`, with an export's drafter, policy and head.

    target.generate(**inputs, custom_generate=DIR, trust_remote_code=True)

The drafter is that of DIR or is passed as assistant_model=drafter; policy and head come from the
folder that it was loaded from. Arguments have the same meaning as in `generate`, and unsupported
ones raise a ValueError that names them. Batch rows are decoded together, each without its padding,
so padding and other rows do not change the output of a row.
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from drafttrain.build.method import Method, build_verifier, make_stop
from drafttrain.build.pairs import drafter_for
from drafttrain.config.kinds import kind_of
from drafttrain.config.methods import STOPS
from drafttrain.config.policy import HEAD, POLICY, Policy, parse_policy, read_policy
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.logits_processing import unavailable
from drafttrain.decoding.engine.sources import start_token
from drafttrain.decoding.padding import end_tokens, padded
from drafttrain.decoding.roles import Drafter, StopPolicy
from drafttrain.decoding.types import Sampling, Source
from drafttrain.export.parts import DEFAULT_LENGTH
from drafttrain.models.acceptance_head import check_head_shape, load_heads
from drafttrain.models.drafters import load_drafter, read_drafter_settings
from drafttrain.models.weight_files import check_finite

UNAVAILABLE = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
"""Optional outputs of `generate` that are not supported."""
KEPT_AS = "_drafttrain_pair"
"""Attribute of the target model that caches its `PreparedPair`."""
snapshot_of = cache(partial(snapshot_download, allow_patterns=[POLICY, f"{HEAD}/*"]))
"""Downloads policy and head of a drafter on the Hub, once per commit."""


@dataclass(frozen=True)
class Request:
    """The resolved arguments of one call of `generate`."""

    config: GenerationConfig
    """Settings of one greedy sequence; `sampling` has the sampling parameters."""
    sampling: Sampling
    sources: Sequence[Source]
    """One source for each returned sequence."""
    starts: Tensor
    """[B, P] the beginning of each returned sequence: the padded prompt or the start token."""
    max_new_tokens: int


def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    assistant_model: PreTrainedModel | str | None = None,
    streamer: BaseStreamer | None = None,
    policy: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    **kwargs: Any,
) -> Tensor | ModelOutput:
    """Returns what `model.generate` returns for the same arguments, decoded speculatively.

    Greedy decoding gives the same tokens; sampling draws from the same distribution and is seeded
    by torch's global generator. If policy.json names the lossy verifier spec-verification, greedy
    outputs may differ, as the model card says.

    assistant_model: the drafter, or its folder or Hub name; default: the drafter in the folder that
    the call gives as custom_generate, which is loaded once. policy: the content of a policy.json;
    default: the policy in the drafter's folder, else a fixed draft length from the drafter's
    generation_config. batch_size: rows decoded at once (the next row enters when one has ended);
    default: all. Raises ValueError, before anything runs, for arguments that are not supported and
    models that do not fit each other.
    """
    folder = called_folder()
    if isinstance(assistant_model, str | Path):
        folder, assistant_model = str(assistant_model), None
    if assistant_model is None and folder is None:
        raise ValueError(
            "assistant_model is missing: load the drafter and give assistant_model=drafter "
            "(Transformers does not pass it to a callable custom_generate: give the folder's name "
            "instead, or call drafttrain.export.generation.generate(model, ...) directly)"
        )
    if batch_size is not None and not (isinstance(batch_size, int) and batch_size >= 1):
        raise ValueError(f"batch_size = {batch_size!r}; give an integer from 1, or leave it out")
    request = read_request(model, inputs, generation_config, kwargs)
    if streamer is not None and len(request.sources) > 1:
        raise ValueError(
            f"a streamer shows one sequence, but {len(request.sources)} are requested; leave it out"
        )
    pair, sampling = prepare(model, assistant_model, policy, folder), request.sampling
    verifier = build_verifier(pair.rules.verifier_for(sampling.greedy), sampling)
    seed = int(torch.randint(2**63 - 1, ()))
    target = pair.target.under(request.config)
    decoder = Method(pair.drafter, pair.stop, verifier).decoder(target, sampling, seed)
    outputs: list[list[int]] = [[] for _ in request.sources]
    if streamer is not None:
        streamer.put(request.starts.cpu())
    active = batch_size or len(outputs)
    for round_ in decoder.decode(request.sources, request.max_new_tokens, active):
        outputs[round_.sequence].extend(round_.emitted)
        if streamer is not None:
            streamer.put(torch.tensor(round_.emitted))
    if streamer is not None:
        streamer.end()
    return whole_sequences(model, request, outputs)


def called_folder() -> str | None:
    """Returns the folder or Hub name given as custom_generate to Transformers' `generate`, which
    does not pass it on, from the caller's stack frame; None if there is no such call."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_locals.get("custom_generate")
        if frame.f_code.co_name == "generate" and isinstance(name, str):
            return name
        frame = frame.f_back
    return None


def whole_sequences(
    model: PreTrainedModel, request: Request, outputs: Sequence[list[int]]
) -> Tensor | ModelOutput:
    """Returns prompts and new tokens, padded on the right, as a ModelOutput if requested."""
    padding, starts = request.config.pad_token_id, request.starts
    if padding is None:  # the first EOS, as in Transformers
        padding = next(iter(end_tokens(request.config)), 0)
    rows, _ = padded([torch.tensor(tokens, device=starts.device) for tokens in outputs], padding)
    sequences = torch.cat([starts, rows], 1)
    if not request.config.return_dict_in_generate:
        return sequences
    if model.config.is_encoder_decoder:
        return GenerateEncoderDecoderOutput(sequences=sequences)
    return GenerateDecoderOnlyOutput(sequences=sequences)


def read_request(
    model: PreTrainedModel,
    inputs: Tensor | None,
    generation_config: GenerationConfig | None,
    arguments: Mapping[str, Any],
) -> Request:
    """Resolves arguments as Transformers does: the call, then generation_config, then the model's.

    Raises ValueError naming an argument that is not supported.
    """
    config, rest = model._prepare_generation_config(generation_config, **arguments)
    input_ids = inputs if inputs is not None else rest.pop("input_ids", None)
    mask = rest.pop("attention_mask", None)
    rest.pop("tokenizer", None)  # Transformers needs it for stop_strings, which are refused
    given = (arguments, {} if generation_config is None else generation_config.to_dict())
    named = {name for settings in given for name, value in settings.items() if value is not None}
    check_config(config, named)
    for name, value in rest.items():
        if value is not None and value is not False and value != []:
            raise ValueError(
                f"{name} is not supported in speculative decoding; give input_ids, attention_mask "
                "and the settings of generate"
            )
    if not isinstance(input_ids, Tensor):
        shown = "nothing" if input_ids is None else f"a {type(input_ids).__name__}"
        raise ValueError(f"input_ids must be a tensor [batch, length], not {shown}")
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        shown = f"{input_ids.dtype} {tuple(input_ids.shape)}"
        raise ValueError(f"input_ids must be integers of shape [batch, length], not {shown}")
    rows = _without_padding(model, config, input_ids, mask)
    size = model.get_input_embeddings().num_embeddings
    for number, row in enumerate(rows):
        if outside := [token for token in row.tolist() if not 0 <= token < size]:
            raise ValueError(
                f"row {number} of the inputs has the token {outside[0]}, but the target has the "
                f"tokens 0 to {size - 1}; use its own tokenizer"
            )
    starts, prefixes = input_ids, rows
    if model.config.is_encoder_decoder:
        starts = prefixes = torch.full((len(rows), 1), start_token(config), device=model.device)
    sources = [Source.of_text(*pair) for pair in zip(rows, prefixes, strict=True)]
    limits = (*given, model.generation_config.to_dict())
    limited = any(settings.get("max_length") is not None for settings in limits)
    max_new_tokens = _lengths(config, starts.shape[1], limited)
    sampling, copies = Sampling(), config.num_return_sequences or 1
    config.num_return_sequences = 1
    if config.do_sample:  # the config becomes greedy: logits processors must apply none of these
        top_k, top_p = config.top_k or 0, 1.0 if config.top_p is None else config.top_p
        min_p, config.min_p = config.min_p or 0.0, None
        if top_p == 0.0:  # keeps only the most likely token, as in Transformers
            top_k, top_p = 1, 1.0
        sampling = Sampling(config.temperature, top_k, top_p, min_p)
        config.do_sample, config.temperature, config.top_k, config.top_p = False, 1.0, 50, 1.0
    copied = [source for source in sources for _ in range(copies)]
    starts = starts.repeat_interleave(copies, dim=0)
    return Request(config, sampling, copied, starts, max_new_tokens)


def check_config(config: GenerationConfig, given: Collection[str] = ()) -> None:
    """Raises ValueError naming the first setting that is not supported.

    given: names of the settings in the call, unlike those from the target's own config.
    """
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams = {config.num_beams}, but speculative decoding has no beam search; give "
            "num_beams=1"
        )
    if config.do_sample and not (config.temperature or 0.0) > 0.0:
        raise ValueError(
            f"temperature = {config.temperature} with do_sample=True; give one above 0, or "
            "do_sample=False for greedy decoding"
        )
    top_k, min_p = config.top_k or 0, config.min_p or 0.0
    if config.do_sample and (top_k < 0 or not 0.0 <= min_p <= 1.0):
        raise ValueError(
            f"top_k = {top_k}, min_p = {min_p}; give a top_k of at least 0 and a min_p from 0 to 1"
        )
    if (name := unavailable(config, not config.do_sample)) in given:
        raise ValueError(
            f"{name} = {getattr(config, name)!r} is not supported in speculative decoding; leave "
            "it out of the call"
        )
    for name in UNAVAILABLE:
        if getattr(config, name):
            raise ValueError(
                f"{name} is not available in speculative decoding; leave it out of the call"
            )


def _without_padding(
    model: PreTrainedModel, config: GenerationConfig, input_ids: Tensor, mask: Tensor | None
) -> list[Tensor]:
    """Returns each row's tokens without padding, on the model's device. Shapes: [B, T] -> [S] each.

    Raises ValueError for a row without tokens or with padding between tokens.
    """
    if mask is None:
        mask, padding = torch.ones_like(input_ids), config.pad_token_id
        if not model.config.is_encoder_decoder and padding not in (None, *end_tokens(config)):
            mask = input_ids != padding
    if not isinstance(mask, Tensor) or mask.shape != input_ids.shape:
        shown = mask if not isinstance(mask, Tensor) else f"shape {tuple(mask.shape)}"
        expected = f"a tensor of the shape {tuple(input_ids.shape)} of input_ids"
        raise ValueError(f"attention_mask must be {expected}, not {shown}")
    mask = mask.bool()
    # a run of tokens begins where the mask is set and was not set one column before
    begins = torch.nn.functional.pad(mask.int(), (1, 0)).diff(dim=1) == 1
    for row, count in enumerate(begins.sum(1).tolist()):
        if count != 1:
            wrong = "has padding between its tokens" if count else "holds no tokens"
            raise ValueError(
                f"row {row} of the inputs {wrong} (attention_mask); put all padding on one side, "
                "and leave empty inputs out"
            )
    return [
        ids[kept].to(model.device, torch.long) for ids, kept in zip(input_ids, mask, strict=True)
    ]


def _lengths(config: GenerationConfig, length: int, given: bool) -> int:
    """Returns the maximal number of new tokens after `length` given ones.

    Changes min_length to min_new_tokens in the config: Transformers counts padding in max_length
    and min_length, but the rows here have none. Raises ValueError if max_length leaves no new
    token.
    """
    allowed = config.max_new_tokens
    if allowed is None:
        allowed = config.max_length - length if given else 20  # Transformers' default
    if allowed < 1:
        raise ValueError(
            f"max_length = {config.max_length} allows no new token after {length} given ones; give "
            "max_new_tokens"
        )
    if config.min_new_tokens is None and (config.min_length or 0) > length:
        config.min_new_tokens = config.min_length - length
    config.min_length = 0
    return allowed


@dataclass(frozen=True)
class PreparedPair:
    """A target and drafter ready to decode, with their stop policy."""

    target: CachedModel
    assistant: PreTrainedModel
    drafter: Drafter
    stop: StopPolicy
    rules: Policy
    """The policy in effect; it also names the verifier."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles as None, so that a copy of the target prepares its own pair."""
        return type(None), ()


def prepare(
    model: PreTrainedModel,
    assistant: PreTrainedModel | None,
    policy: Mapping[str, Any] | None,
    folder: str | None = None,
) -> PreparedPair:
    """Returns the checked pair, from the cache unless models, device or policy have changed.

    It is cached as an attribute of the target and so freed with it. folder: the export's folder or
    Hub name, from which the drafter is loaded if none is given, with the target's device and dtype.
    Raises ValueError for models that do not fit each other, for a policy or head that cannot be
    used, and for a folder without a drafter.
    """
    kept = vars(model).get(KEPT_AS)  # a copy of the model has the attribute of the original
    valid = isinstance(kept, PreparedPair) and kept.target.model is model
    valid = valid and kept.target.device == model.device
    if assistant is None and valid and kept.assistant.name_or_path == folder:
        if (kept.assistant.device, kept.assistant.dtype) == (model.device, model.dtype):
            assistant = kept.assistant
    if assistant is None:
        settings = read_drafter_settings(str(folder))
        assistant = load_drafter(str(folder), settings).to(model.device, model.dtype)
    if valid and kept.assistant is assistant and not (model.training or assistant.training):
        if kept.rules == choose_policy(assistant, policy):
            return kept
    check_finite(model, f"target {model.name_or_path!r}")
    drafter = drafter_for(model, assistant, "assistant_model")
    rules = choose_policy(assistant, policy)
    stop = open_stop(assistant, rules)
    pair = PreparedPair(CachedModel(model), assistant, drafter, stop, rules)
    setattr(model, KEPT_AS, pair)
    return pair


def choose_policy(assistant: PreTrainedModel, policy: Mapping[str, Any] | None) -> Policy:
    """Returns the argument, else the policy.json in the drafter's folder, else a fixed length.

    Raises ValueError if the policy or the drafter's num_assistant_tokens cannot be used.
    """
    if policy is not None:
        return parse_policy(policy)
    folder = _own_folder(assistant)
    if folder is not None and (folder / POLICY).is_file():
        return read_policy(folder / POLICY)
    if kind_of(assistant.config).drafts == "blocks":
        return Policy(stop="fixed", k=assistant.config.k)
    length = assistant.generation_config.num_assistant_tokens or DEFAULT_LENGTH
    if length not in range(1, 1025):
        raise ValueError(
            f"the drafter's generation_config sets num_assistant_tokens = {length!r}; set it to an "
            "integer from 1 to 1024"
        )
    return Policy(stop="fixed", k=length)


def open_stop(assistant: PreTrainedModel, rules: Policy) -> StopPolicy:
    """Makes the stop policy with the head in the drafter's folder. Raises ValueError if the policy
    needs a head that is missing or does not fit."""
    folder, head = _own_folder(assistant), None
    if STOPS[rules.stop].reads_head and folder is not None and (folder / HEAD).is_dir():
        [head] = load_heads(folder / HEAD).values()
        check_head_shape(head.to(assistant.device), assistant.config, str(folder / HEAD))
    return make_stop(rules.stop_config(), head)


def _own_folder(assistant: PreTrainedModel) -> Path | None:
    """Returns the folder that the drafter was loaded from; None for a model without one.

    Downloads policy and head if that is a repository on the Hub. Raises ValueError if a local
    folder no longer exists.
    """
    name = assistant.name_or_path
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    commit = assistant.config._commit_hash
    if commit is None:
        raise ValueError(
            f"assistant_model was loaded from {name!r}, which no longer exists; load it from its "
            "present folder"
        )
    return Path(snapshot_of(name, revision=commit))
