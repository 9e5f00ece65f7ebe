"""`generate` for Transformers' `custom_generate`: an export's drafter, policy and head at work.

    target.generate(**inputs, custom_generate=DIR, trust_remote_code=True)

The drafter is the folder's own, or assistant_model=drafter; policy and head are those of the folder
that it was loaded from. Arguments mean what they mean in `generate`; what cannot be honoured is
refused by name. Rows are decoded together, each without its padding, so that neither padding nor
neighbours change what becomes of a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
from drafttrain.decoding.roles import Drafter, StopPolicy
from drafttrain.decoding.types import Sampling, Source
from drafttrain.export.parts import DEFAULT_LENGTH
from drafttrain.models.acceptance_head import check_head_shape, load_heads
from drafttrain.models.drafters import load_drafter, read_drafter_settings
from drafttrain.models.weight_files import check_finite

UNAVAILABLE = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
"""Outputs of `generate` that are not computed here."""
DEFAULT_NEW_TOKENS = 20
"""Transformers' own default length."""
KEPT_AS = "_drafttrain_pair"
"""Attribute of the target that holds its prepared pair."""


@dataclass(frozen=True)
class Request:
    """One call of `generate`, resolved."""

    config: GenerationConfig
    """Resolved, as for one greedy sequence: the next two say how many, and how to sample."""
    sampling: Sampling
    sources: Sequence[Source]
    """A source a returned sequence."""
    starts: Tensor
    """[B, P] what each returned sequence starts with: the padded prompt, or the start token."""
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
    """What `model.generate` returns for the same arguments, with drafts of `assistant_model`.

    Greedy decoding gives the same tokens; sampling draws from the same distribution, seeded by
    torch's global generator. (Where policy.json names the lossy verifier spec-verification, greedy
    outputs may differ; its card says so.) `policy` is the content of a policy.json; default:
    that of the folder the drafter was loaded from, else as many tokens a round as the drafter's
    generation_config says. The drafter may be given by its folder or Hub name; without an
    assistant_model it is that which the call gives as custom_generate, loaded once. `batch_size` is
    how many rows are decoded at once, one entering as another one ends; default: all. Raises
    ValueError, before anything runs, for arguments that cannot be honoured and models that do not
    go together.
    """
    folder = called_folder()
    if isinstance(assistant_model, str | Path):
        folder, assistant_model = str(assistant_model), None
    if assistant_model is None and folder is None:
        raise ValueError(
            "assistant_model is missing: load the drafter and give assistant_model=drafter (a "
            "callable custom_generate is not passed it: give the folder's name instead, or call "
            "drafttrain.export.generation.generate(model, ...) itself)"
        )
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size = {batch_size}; give at least 1, or leave it out")
    request = read_request(model, inputs, generation_config, kwargs)
    if streamer is not None and len(request.sources) > 1:
        raise ValueError(
            f"a streamer shows one sequence, but {len(request.sources)} are asked for; leave it out"
        )
    pair = prepare(model, assistant_model, policy, folder)
    sampling = request.sampling
    verifier = build_verifier(pair.rules.verifier_for(sampling.greedy), sampling)
    method = Method(pair.drafter, pair.stop, verifier)
    seed = int(torch.randint(2**63 - 1, ()))
    decoder = method.decoder(pair.target.under(request.config), sampling, seed)
    outputs: list[list[int]] = [[] for _ in request.sources]
    if streamer is not None:
        streamer.put(request.starts.cpu())
    together = batch_size or len(outputs)
    for played in decoder.decode(request.sources, request.max_new_tokens, together):
        outputs[played.sequence].extend(played.emitted)
        if streamer is not None:
            streamer.put(torch.tensor(played.emitted))
    if streamer is not None:
        streamer.end()
    return padded(model, request, outputs)


def called_folder() -> str | None:
    """The folder or Hub name given as custom_generate to Transformers' `generate`, which hands on
    every other argument: it is read from the call's frame. None without such a call."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("custom_generate")
        if frame.f_code.co_name == "generate" and isinstance(found, str):
            return found
        frame = frame.f_back
    return None


def padded(
    model: PreTrainedModel, request: Request, outputs: Sequence[list[int]]
) -> Tensor | ModelOutput:
    """Prompts with their new tokens, padded on the right; in a ModelOutput where asked for."""
    padding, longest = request.config.pad_token_id, max(map(len, outputs))
    if padding is None:  # the first EOS, as in Transformers
        padding = next(iter(_ids(request.config.eos_token_id)), 0)
    rows = [tokens + [padding] * (longest - len(tokens)) for tokens in outputs]
    sequences = torch.cat([request.starts, torch.tensor(rows, device=request.starts.device)], 1)
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
    """Resolve arguments as Transformers does: call over generation_config over the model's own.

    Raises ValueError naming the argument that cannot be honoured.
    """
    config, rest = model._prepare_generation_config(generation_config, **arguments)
    input_ids = inputs if inputs is not None else rest.pop("input_ids", None)
    mask = rest.pop("attention_mask", None)
    rest.pop("tokenizer", None)  # Transformers needs it for stop_strings, which are refused
    given = (arguments, {} if generation_config is None else generation_config.to_dict())
    check_config(
        config, {name for one in given for name, value in one.items() if value is not None}
    )
    others = {name: value for name, value in rest.items() if value is not None}
    if left := [name for name, value in others.items() if value is not False and value != []]:
        raise ValueError(
            f"{left[0]} cannot be honoured when drafts are verified; give input_ids, "
            "attention_mask and the settings of generate"
        )
    if input_ids is None or input_ids.dim() != 2 or input_ids.is_floating_point():
        shown = "nothing" if input_ids is None else f"{input_ids.dtype} {tuple(input_ids.shape)}"
        raise ValueError(f"input_ids must be integers of shape [batch, length], not {shown}")
    rows = _without_padding(model, config, input_ids, mask)
    starts = input_ids
    if model.config.is_encoder_decoder:
        first = config.decoder_start_token_id
        first = config.bos_token_id if first is None else first
        if not isinstance(first, int):
            raise ValueError(f"decoder_start_token_id is {first!r}; one token id is needed")
        starts = torch.full((len(rows), 1), first, device=model.device)
        sources = [Source.of_text(row, start) for row, start in zip(rows, starts, strict=True)]
    else:
        sources = [Source.of_text(row, row) for row in rows]
    limits = (*given, model.generation_config.to_dict())
    limited = any(settings.get("max_length") is not None for settings in limits)
    max_new_tokens = _lengths(config, starts.shape[1], limited)
    sampling, copies = Sampling(), config.num_return_sequences or 1
    config.num_return_sequences = 1
    if config.do_sample:  # the config is left greedy: the logits processors do none of these
        top_k, top_p = config.top_k or 0, 1.0 if config.top_p is None else config.top_p
        min_p, config.min_p = config.min_p or 0.0, None
        if top_p == 0.0:  # the likeliest token alone, as Transformers samples with it
            top_k, top_p = 1, 1.0
        sampling = Sampling(config.temperature, top_k, top_p, min_p)
        config.do_sample, config.temperature, config.top_k, config.top_p = False, 1.0, 50, 1.0
    return Request(
        config,
        sampling,
        [source for source in sources for _ in range(copies)],
        starts.repeat_interleave(copies, dim=0),
        max_new_tokens,
    )


def check_config(config: GenerationConfig, given: Collection[str] = ()) -> None:
    """Refuse by name settings that cannot be honoured; given: those of the call, which are not the
    target's own. Raises ValueError."""
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams = {config.num_beams}, but drafts are verified along one sequence; give "
            "num_beams=1"
        )
    if config.do_sample and not (config.temperature or 0.0) > 0.0:
        raise ValueError(
            f"temperature = {config.temperature} with do_sample=True; give one above 0, or "
            "do_sample=False for greedy decoding"
        )
    if (name := unavailable(config, not config.do_sample)) in given:
        raise ValueError(
            f"{name} = {getattr(config, name)!r} cannot be honoured when drafts are verified; "
            "leave it out of the call"
        )
    if wanted := [name for name in UNAVAILABLE if getattr(config, name)]:
        raise ValueError(f"{wanted[0]} is not available when drafts are verified; leave it out")


def _without_padding(
    model: PreTrainedModel, config: GenerationConfig, input_ids: Tensor, mask: Tensor | None
) -> list[Tensor]:
    """Each row's tokens without its padding, on the model's device. Shapes: [B, T] -> [S] each.

    The padding may be on either side, but not between tokens.
    """
    if mask is None:
        mask, padding = torch.ones_like(input_ids), config.pad_token_id
        if not model.config.is_encoder_decoder and padding not in (
            None,
            *_ids(config.eos_token_id),
        ):
            mask = input_ids != padding
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, but input_ids {tuple(input_ids.shape)}"
        )
    mask = mask.bool()
    begins = mask & ~torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], dim=1)
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
    """Most new tokens after `length` given ones; a minimal length becomes one of new tokens.

    Transformers counts padding into max_length and min_length, rows here have none.
    """
    if config.max_new_tokens is not None:
        allowed = config.max_new_tokens
    else:
        allowed = config.max_length - length if given else DEFAULT_NEW_TOKENS
    if allowed < 1:
        raise ValueError(
            f"max_length = {config.max_length} leaves no room after {length} tokens; give "
            "max_new_tokens"
        )
    if config.min_new_tokens is None and (config.min_length or 0) > length:
        config.min_new_tokens = config.min_length - length
    config.min_length = 0
    return allowed


def _ids(value: int | Sequence[int] | None) -> Sequence[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else value


@dataclass(frozen=True)
class PreparedPair:
    """A target and a drafter ready to decode, and when a round stops."""

    target: CachedModel
    assistant: PreTrainedModel
    drafter: Drafter
    stop: StopPolicy
    rules: Policy
    """The policy in effect: its verifier counts too."""
    policy: Mapping[str, Any] | None
    """As the caller gave it."""


def prepare(
    model: PreTrainedModel,
    assistant: PreTrainedModel | None,
    policy: Mapping[str, Any] | None,
    folder: str | None = None,
) -> PreparedPair:
    """Check and wrap a pair; the next call finds it unless models, device or policy changed.

    It is kept as an attribute of the target, and so freed with it. folder: the export, or its name
    on the Hub, from which a drafter that is not given is loaded once, on the target's device and in
    its type. Raises ValueError for models that do not go together, for a policy or head that cannot
    be used, and for a folder without a drafter.
    """
    kept = vars(model).get(KEPT_AS)  # a copy of the model has that of the original
    here = isinstance(kept, PreparedPair) and kept.target.model is model
    here = here and kept.target.device == model.device
    if assistant is None and here and kept.assistant.name_or_path == folder:
        if (kept.assistant.device, kept.assistant.dtype) == (model.device, model.dtype):
            assistant = kept.assistant
    if assistant is None:
        settings = read_drafter_settings(str(folder))
        assistant = load_drafter(str(folder), settings).to(model.device, model.dtype)
    if here and kept.assistant is assistant and kept.policy == policy:
        if not (model.training or assistant.training):
            return kept
    check_finite(model, f"target {model.name_or_path!r}")
    drafter = drafter_for(model, assistant, "assistant_model")
    rules, stop = choose_policy(assistant, policy)
    pair = PreparedPair(CachedModel(model), assistant, drafter, stop, rules, policy)
    setattr(model, KEPT_AS, pair)
    return pair


def choose_policy(
    assistant: PreTrainedModel, policy: Mapping[str, Any] | None
) -> tuple[Policy, StopPolicy]:
    """The policy given, or of the drafter's own folder, or a fixed length; and its stops. Raises
    ValueError."""
    folder = _own_folder(assistant)
    if policy is not None:
        rules = parse_policy(policy)
    elif folder is not None and (folder / POLICY).is_file():
        rules = read_policy(folder / POLICY)
    elif kind_of(assistant.config).drafts == "blocks":
        rules = Policy(stop="fixed", k=assistant.config.k)
    else:
        length = assistant.generation_config.num_assistant_tokens
        rules = Policy(stop="fixed", k=length or DEFAULT_LENGTH)
    head = None
    if STOPS[rules.stop].reads_head and folder is not None and (folder / HEAD).is_dir():
        [head] = load_heads(folder / HEAD).values()
        check_head_shape(head.to(assistant.device), assistant.config, str(folder / HEAD))
    return rules, make_stop(rules.stop_config(), head)


def _own_folder(assistant: PreTrainedModel) -> Path | None:
    """Where the drafter was loaded from; None for a model that was never on disk."""
    name = assistant.name_or_path
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    commit = assistant.config._commit_hash
    if commit is None:
        raise ValueError(
            f"assistant_model was loaded from {name!r}, which is no longer there; load it "
            "from where it lies now"
        )
    return Path(snapshot_download(name, revision=commit, allow_patterns=[POLICY, f"{HEAD}/*"]))
