"""Models called through Transformers' own modules: every family, and whatever wraps a model."""

from __future__ import annotations

import copy

import accelerate
import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.ao.quantization import quantize_dynamic
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.probe import reference_logits
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.types import Proposal
from tests.decoding.decoded import decoder_of
from tests.tiny_drafters import shared, tiny_drafter
from tests.tiny_models import tiny_model

SIZE = 100
IDS = {"vocab_size": SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = IDS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GROUPED = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
TWO_KINDS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
BART = IDS | {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 2,
    "max_position_embeddings": 64,
}
T5 = IDS | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"num_decoder_layers": 2, "decoder_start_token_id": 0}
FAMILIES = {
    "Llama": SMALL,
    "Qwen3": SMALL | {"head_dim": 8},
    "Phi3": SMALL | {"sliding_window": 5},
    "Mistral": SMALL | {"sliding_window": 5},
    "Starcoder2": SMALL | {"sliding_window": 5},
    "Gemma2": SMALL | {"head_dim": 8} | TWO_KINDS,
    "Gemma3Text": SMALL | {"head_dim": 8} | TWO_KINDS,
    "Olmo2": SMALL,
    "Olmo3": SMALL | TWO_KINDS,
    "Granite": SMALL | {"logits_scaling": 3.0},
    "Cohere": SMALL | {"logit_scale": 0.2},
    "Cohere2": SMALL | {"head_dim": 8} | TWO_KINDS,
    "Mixtral": SMALL | {"num_local_experts": 4, "sliding_window": None},
    "Qwen2Moe": SMALL
    | {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "GptOss": SMALL | {"head_dim": 8, "num_local_experts": 4} | TWO_KINDS,
    "GPT2": IDS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "GPTNeoX": GROUPED,
    "OPT": IDS
    | {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"max_position_embeddings": 64, "word_embed_proj_dim": 32},
    "Falcon": IDS | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "Marian": BART,
    "Bart": BART,
    "MBart": BART,
    "Pegasus": BART,
    "M2M100": BART,
    "Blenderbot": BART,
    "T5": T5,
    "MT5": T5,
    "UMT5": T5,
}
"""Settings of a tiny model of each family, by the name of its configuration class."""
SINGLE = ("Gemma2", "Mixtral", "Qwen2Moe", "GptOss")
"""Families that compute experts or attention in float32."""
EAGER = ["Gemma2", "GptOss"]
if Version(transformers.__version__) < Version("5.18"):
    EAGER.append("UMT5")  # its decoder looks ahead there under sdpa, and is refused
TREE = torch.tensor([-1, 0, 0, 1])


def any_family(name: str) -> PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name])
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(0)
    dtype = torch.float32 if name in SINGLE else torch.float64
    eager = {"attn_implementation": "eager"} if name in EAGER else {}
    model = kind.from_config(config, dtype=dtype, **eager).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)  # so that rows differ
    return model


def by_modules(model: PreTrainedModel) -> CachedModel:
    """The model called through its modules, also where its weights would be read."""
    return CachedModel(model)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_trees_of_unequal_sequences_have_the_logits_of_their_paths(family: str):
    """Two sequences, a tree each, a kept path, then a chain: every row equals a fresh forward."""
    model = any_family(family)
    target = by_modules(model)
    generator = torch.Generator().manual_seed(1)
    sources = [
        make_source(torch.randint(5, SIZE, (length,), generator=generator), model)
        for length in (7, 4)
    ]
    states = target.encode_all(sources)
    tokens = [source.prefix for source in sources]
    for parents, path in ((TREE, [0, 1, 3]), (TREE, [0, 2]), (torch.arange(-1, 3), [0])):
        drafts = [
            Proposal(torch.randint(5, SIZE, (4,), generator=generator), parents) for _ in states
        ]
        outputs = target.score(states, tokens, drafts)
        for source, own, draft, output in zip(sources, tokens, drafts, outputs, strict=True):
            for node in range(4):
                nodes = path_to(node, parents)
                expected = reference_logits(model, source, torch.cat([own, draft.tokens[nodes]]))
                spread = expected[-1].abs().max()
                worst = (output.logits[node + 1] - expected[-1]).abs().max() / spread
                assert worst < (1e-4 if family in SINGLE else 1e-9), (family, node)
        for state in states:
            target.keep(state, torch.tensor(path))
        tokens = [
            torch.cat([own, draft.tokens[path], draft.tokens[:1]])
            for own, draft in zip(tokens, drafts, strict=True)
        ]


def path_to(node: int, parents: torch.Tensor) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path, node = [node, *path], int(parents[node])
    return path


class LowRank(nn.Module):
    """A linear layer with an adapter, as LoRA puts it in a model."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + 3 * self.up(self.down(inputs))


def adapted(model: PreTrainedModel) -> None:
    torch.manual_seed(4)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name in ("q_proj", "v_proj", "c_fc", "q", "v"):
                setattr(module, name, LowRank(child))


def hooked(model: PreTrainedModel) -> None:
    layer = next(m for m in model.get_decoder().modules() if isinstance(m, nn.ModuleList))[0]
    layer.register_forward_pre_hook(lambda module, inputs: (inputs[0].roll(1, -1), *inputs[1:]))


def replaced(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    usual = head.forward
    head.forward = lambda states: usual(states.flip(-1))


@pytest.mark.parametrize("wrap", [adapted, hooked, replaced], ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize("family", ["llama", "qwen3", "bart", "t5"])
def test_adapters_hooks_and_replaced_forwards_are_decoded_with(family: str, wrap) -> None:
    """Reading the weights alone would decode the bare model."""
    model = tiny_model(family)
    bare = copy.deepcopy(model)
    wrap(model)
    source = make_source(torch.tensor([5, 9, 20, 7, 11]), model)
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    given = {"inputs": source.input_ids[None]} if name == "decoder_input_ids" else {}
    given |= {} if given else {name: source.prefix[None]}
    with torch.inference_mode():
        expected = model.generate(**given, do_sample=False, max_new_tokens=12)[0]
        without = bare.generate(**given, do_sample=False, max_new_tokens=12)[0]
    assert expected.tolist() != without.tolist()
    assert plain_tokens(model, source) == expected[len(source.prefix) :].tolist()


def plain_tokens(model, source, target=None, drafter=None) -> list[int]:
    decoder = decoder_of(target or CachedModel(model), drafter or NoDrafter(), 4)
    return decoder.decode_all([source], 12)[0].tokens


def test_a_call_leaves_the_model_as_it_was() -> None:
    model = any_family("M2M100")
    target = CachedModel(model)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    source = make_source(torch.tensor([5, 9, 20]), model)
    target.score([target.encode(source)], [source.prefix], [Proposal(torch.arange(4) + 5, TREE)])
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys(), name
        assert not module._forward_hooks and not module._forward_pre_hooks, name


def generated(model: PreTrainedModel, source) -> list[int]:
    ids = source.input_ids[None]
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **SETTINGS)
    return found[0, len(source.prefix) :].tolist()


SETTINGS = {"do_sample": False, "max_new_tokens": 12}


@pytest.mark.parametrize("family", ["llama", "marian", "t5"])
def test_weights_that_change_between_calls_are_decoded_with(family: str) -> None:
    """A step of training, load_state_dict, another precision: of one engine, made before."""
    model = tiny_model(family)
    target, source = CachedModel(model), make_source(torch.tensor([5, 9, 20, 7]), model)

    def multiply() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)

    def load() -> None:
        model.load_state_dict({name: own / 2 for name, own in model.state_dict().items()})

    for change in (lambda: None, multiply, load, lambda: model.to(torch.bfloat16)):
        change()
        assert plain_tokens(model, source, target) == generated(model, source)


@pytest.mark.parametrize("family", ["llama", "marian", "t5", "bart"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precisions_are_decoded_as_generate_decodes_them(family: str, dtype) -> None:
    model = tiny_model(family).to(dtype)
    source = make_source(torch.tensor([5, 9, 20, 7]), model)
    assert plain_tokens(model, source) == generated(model, source)


def test_a_spec_drafter_drafts_for_a_marian_in_bfloat16() -> None:
    model = shared("marian").to(torch.bfloat16)
    drafter = BlockDrafter(tiny_drafter("marian").to(torch.bfloat16))
    source = make_source(torch.tensor([5, 9, 20, 7]), model)
    assert plain_tokens(model, source, drafter=drafter) == generated(model, source)


@pytest.mark.parametrize("family", ["llama", "bart"])
def test_off_loaded_and_compiled_models_are_decoded_as_generate_decodes_them(family: str) -> None:
    model = tiny_model(family)
    source = make_source(torch.tensor([5, 9, 20, 7]), model)
    expected = generated(model, source)
    assert plain_tokens(torch.compile(model, backend="eager"), source) == expected
    accelerate.cpu_offload(model, execution_device="cpu")
    assert plain_tokens(model, source) == expected


def test_activations_that_are_quantised_by_the_call_are_refused() -> None:
    """Their scale is that of all tokens of a call: a row depends on those after it."""
    model = quantize_dynamic(tiny_model("llama").float(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match="'llama' model .* quantises by the call"):
        CachedModel(model)
