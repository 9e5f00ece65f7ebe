"""Tiny random float64 models of each family that produce varied text."""

import copy
from collections.abc import Sequence

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)

from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.engine.speech import speech_source
from drafttrain.decoding.types import Source

PAD, EOS, UNK, BOS = 0, 1, 2, 3
VOCAB = 40
SPECIAL = {
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}
LAYERS = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "init_std": 0.15,
}
BART_SHAPE = SPECIAL | LAYERS
BART_SHAPE |= {"bos_token_id": BOS, "max_position_embeddings": 64, "forced_eos_token_id": None}
T5_SHAPE = SPECIAL | {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": PAD,
}
MEL_BINS, FRAMES = 4, 24
START, LANGUAGES, TASKS, NO_TIMESTAMPS = 4, {"<|en|>": 5, "<|de|>": 6, "<|fr|>": 7}, (8, 9), 39
"""Control tokens of the tiny multilingual Whisper; its tasks are `transcribe` and `translate`.

NO_TIMESTAMPS is the last token, because `generate` treats larger ids as timestamps."""
WHISPER_SHAPE = SPECIAL | LAYERS
WHISPER_SHAPE |= {
    "pad_token_id": EOS,
    "bos_token_id": EOS,
    "decoder_start_token_id": START,
    "num_mel_bins": MEL_BINS,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": 64,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
MULTILINGUAL = {
    "is_multilingual": True,
    "lang_to_id": LANGUAGES,
    "task_to_id": dict(zip(("transcribe", "translate"), TASKS, strict=True)),
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "suppress_tokens": [START, *LANGUAGES.values(), *TASKS, NO_TIMESTAMPS, 21, 33],
    "begin_suppress_tokens": [EOS, 12, 17],
    "return_timestamps": False,
}
"""Values for the generation_config of the tiny Whisper."""
CAUSAL_SHAPE = SPECIAL | {
    "bos_token_id": BOS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
GROUPED = {"num_key_value_heads": 2}
CAUSAL = {
    "llama": ("Llama", GROUPED),
    "mistral": ("Mistral", GROUPED | {"head_dim": 4, "sliding_window": None}),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 4}),
    "gpt2": ("GPT2", {}),
    "gpt-neox": ("GPTNeoX", {}),
    "opt": ("OPT", {"ffn_dim": 32, "word_embed_proj_dim": 16}),
}
SEQ2SEQ = {
    "marian": ("Marian", BART_SHAPE | {"decoder_start_token_id": PAD, "scale_embedding": True}),
    "bart": ("Bart", BART_SHAPE | {"decoder_start_token_id": 1}),
    "mbart": ("MBart", BART_SHAPE | {"decoder_start_token_id": EOS, "scale_embedding": True}),
    "pegasus": ("Pegasus", BART_SHAPE | {"decoder_start_token_id": PAD}),
    "t5": ("T5", T5_SHAPE | {"scale_decoder_outputs": True}),
    "flan-t5": (
        "T5",
        T5_SHAPE | {"feed_forward_proj": "gated-gelu", "scale_decoder_outputs": False},
    ),
}
SHAPES = {family: (name, CAUSAL_SHAPE | own) for family, (name, own) in CAUSAL.items()} | SEQ2SEQ
SHAPES["whisper"] = ("Whisper", WHISPER_SHAPE)
"""The name of the configuration class and the settings of each family."""
CAUSAL_FAMILIES = tuple(CAUSAL)
SPEECH_FAMILIES = ("whisper",)
FAMILIES = tuple(SEQ2SEQ)


def random_model(name: str, settings: dict[str, object], seed: int) -> PreTrainedModel:
    """Returns a random model of a configuration class in float64 and eval mode."""
    config = getattr(transformers, f"{name}Config")(**settings)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    kind = AutoModelForSpeechSeq2Seq if name == "Whisper" else kind
    torch.manual_seed(seed)
    return kind.from_config(config).double().eval()


def tiny_model(family: str, seed: int = 3, **changes: object) -> PreTrainedModel:
    """Returns a random model of a family in eval mode. changes: settings of its configuration."""
    name, settings = SHAPES[family]
    model = random_model(name, settings | changes, seed)
    # a separate head: tied to the embeddings, random models would repeat their last token
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.randn_like(head.weight))
    reads = model.get_decoder() if family in SPEECH_FAMILIES else model
    reads.get_input_embeddings().weight.data.normal_()
    if family in CAUSAL:
        model.lm_head.weight.data[EOS] *= 2.0  # some sequences end early
    if family in SPEECH_FAMILIES:
        for name, value in MULTILINGUAL.items():
            setattr(model.generation_config, name, value)
        model.generation_config._from_model_config = False  # kept when reloaded
        head.weight.data[EOS] *= 2.0  # some sequences end early
        for layer in model.get_decoder().layers:  # outputs depend on the clip
            layer.encoder_attn.out_proj.weight.data *= 2.0
    if family in ("marian", "bart", "mbart", "pegasus"):
        model.final_logits_bias.normal_(std=0.5)  # omitting it changes outputs
        model.final_logits_bias[0, EOS] += 2.0  # some sequences end early
    return model


def with_a_token_to_spare(family: str) -> PreTrainedModel:
    """Returns a language model of three layers with an extra token for masks, which it never
    generates."""
    model = tiny_model(family, num_hidden_layers=3, vocab_size=VOCAB + 1)
    model.generation_config.suppress_tokens = [VOCAB]
    return model


def tiny_source(ids: Sequence[int] | torch.Tensor, model: PreTrainedModel) -> Source:
    """Returns the source of these tokens; for speech models random features derived from them."""
    ids = torch.as_tensor(ids)
    if model.main_input_name != "input_features":
        return make_source(ids, model)
    generator = torch.Generator().manual_seed(int(ids.sum()) + len(ids))
    drawn = torch.randn(MEL_BINS, FRAMES + 1, generator=generator, dtype=torch.float64)
    return speech_source(drawn[:, 1:] + 4.0 * drawn[:, :1], model)


def near_copy(model: PreTrainedModel, noise: float, seed: int) -> PreTrainedModel:
    """Returns a noisy copy of a target, which often agrees with it."""
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += noise * torch.randn_like(parameter)
    return other


def tiny_t5gemma() -> PreTrainedModel:
    """Returns an encoder-decoder with separate configurations of encoder and decoder, and sliding
    windows in some layers."""
    part = CAUSAL_SHAPE | {"num_key_value_heads": 2, "head_dim": 4, "query_pre_attn_scalar": 4}
    part |= {"sliding_window": 4, "final_logit_softcapping": None}
    config = T5GemmaConfig(encoder=dict(part), decoder=dict(part), vocab_size=VOCAB)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = BOS, PAD, EOS
    torch.manual_seed(0)
    model = T5GemmaForConditionalGeneration(config).double().eval()
    model.generation_config.decoder_start_token_id = BOS
    return model


def tiny_seq2seq(family: str, **changes: object) -> PreTrainedModel:
    """Returns an encoder-decoder of a family that is not in `FAMILIES`; changes as in `tiny_model`,
    not for T5Gemma."""
    if family == "t5gemma":
        return tiny_t5gemma()
    bart = BART_SHAPE | {"decoder_start_token_id": BOS, "tie_word_embeddings": True}
    t5 = T5_SHAPE | {"tie_word_embeddings": True}
    led = bart | {"attention_window": [4, 8], "max_decoder_position_embeddings": 64}
    two = {"decoder_vocab_size": 36, "share_encoder_decoder_embeddings": False}
    name, shape = {
        "m2m100": ("M2M100", bart),
        "blenderbot": ("Blenderbot", bart),
        "led": ("LED", led),
        "longt5": ("LongT5", t5),
        "mt5": ("MT5", t5),
        "umt5": ("UMT5", t5),
        "two vocabularies": ("Marian", bart | two | SPECIAL),
    }[family]
    return random_model(name, shape | changes, seed=0)
