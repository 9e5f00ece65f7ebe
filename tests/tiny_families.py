"""Tiny random models of further families, by the name of their configuration class."""

import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tiny_models import (
    CAUSAL_FAMILIES,
    CAUSAL_SHAPE,
    FAMILIES,
    SPECIAL,
    SPEECH_FAMILIES,
    VOCAB,
    tiny_model,
    tiny_seq2seq,
)

GROUPED = CAUSAL_SHAPE | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 4}
TWO_KINDS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
GPT = {"vocab_size": VOCAB, "eos_token_id": 1, "n_embd": 16, "n_layer": 2, "n_head": 2}
FURTHER = {
    "Phi3": GROUPED | {"sliding_window": 5},
    "Mistral": GROUPED | {"sliding_window": 5},
    "Starcoder2": GROUPED | {"sliding_window": 5},
    "Gemma2": HEADS | TWO_KINDS,
    "Gemma3Text": HEADS | TWO_KINDS,
    "Olmo2": GROUPED,
    "Olmo3": GROUPED | TWO_KINDS,
    "Granite": GROUPED | {"logits_scaling": 3.0},
    "Cohere": GROUPED | {"logit_scale": 0.2},
    "Cohere2": HEADS | TWO_KINDS,
    "Mixtral": GROUPED | {"num_local_experts": 4, "sliding_window": None},
    "Qwen2Moe": GROUPED
    | {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "GptOss": HEADS | {"num_local_experts": 4} | TWO_KINDS,
    "Falcon": CAUSAL_SHAPE,
    "GPTJ": GPT | {"rotary_dim": 4, "n_positions": 64},
    "Bloom": GPT,
    "XGLM": SPECIAL
    | {"d_model": 16, "ffn_dim": 32, "num_layers": 2, "attention_heads": 2, "init_std": 0.15},
}
"""Settings of a tiny model of each family."""
SEQ2SEQ = ("m2m100", "blenderbot", "mt5", "umt5")
if Version(transformers.__version__) < Version("5.18"):
    SEQ2SEQ = SEQ2SEQ[:-1]  # UMT5's decoder is not causal there: refused (test_spec_drafter.py)
TINY = (*CAUSAL_FAMILIES, *FAMILIES, *SPEECH_FAMILIES, *SEQ2SEQ)
"""Families of `tiny_models.py` with tree attention."""
SINGLE = ("Gemma2", "XGLM", "Mixtral", "Qwen2Moe", "GptOss")
"""Families that compute experts or attention in float32."""
EAGER = ("Gemma2", "GptOss")
ATTENTIONS = [
    (family, attention)
    for family in TINY
    for attention in ("sdpa", "eager")
    if attention == "eager" or family not in EAGER
]


def any_family(name: str, **changes: object) -> PreTrainedModel:
    """Returns a random model of a family of `FURTHER` or `TINY` whose outputs vary."""
    if name not in FURTHER:
        model = tiny_seq2seq(name) if name in SEQ2SEQ else tiny_model(name, **changes)
    else:
        config = getattr(transformers, f"{name}Config")(**FURTHER[name] | changes)
        torch.manual_seed(0)
        dtype = torch.float32 if name in SINGLE else torch.float64
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(3)
    if name in EAGER:
        model.set_attn_implementation("eager")
    return model
