"""Models called through Transformers' modules: every family, and wrapped models."""

import copy

import accelerate
import pytest
import torch
from torch import nn
from torch.ao.quantization import quantize_dynamic
from transformers import PreTrainedModel

from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.types import Proposal
from tests.decoding.decoded import decoder_of, generate
from tests.tiny_families import any_family
from tests.tiny_models import tiny_model

TREE = torch.tensor([-1, 0, 0, 1])


class LowRank(nn.Module):
    """A linear layer with a low-rank adapter, as in LoRA."""

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
def test_adapters_hooks_and_replaced_forwards_are_decoded_with(family, wrap):
    """Reading only the weights would decode the model without them."""
    model = tiny_model(family)
    bare = copy.deepcopy(model)
    wrap(model)
    source = make_source(torch.tensor([5, 9, 20, 7, 11]), model)
    [expected], [without] = (generate(one, [source], 12) for one in (model, bare))
    assert plain_tokens(model, source) == expected != without


def plain_tokens(model, source, target=None) -> list[int]:
    return decoder_of(target or CachedModel(model), NoDrafter()).decode_all([source], 12)[0].tokens


def test_a_call_leaves_the_model_as_it_was():
    model = any_family("m2m100")
    target = CachedModel(model)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    source = make_source(torch.tensor([5, 9, 20]), model)
    target.score([(target.encode(source), source.prefix, Proposal(torch.arange(4) + 5, TREE))])
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys(), name
        assert not module._forward_hooks and not module._forward_pre_hooks, name


@pytest.mark.parametrize("family", ["llama", "marian", "t5"])
def test_weights_that_change_between_calls_are_decoded_with(family):
    """A training step, load_state_dict and another precision, with an engine made before."""
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
        assert plain_tokens(model, source, target) == generate(model, [source], 12)[0]


@pytest.mark.parametrize("family", ["llama", "marian", "t5", "bart"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precisions_are_decoded_as_generate_decodes_them(family, dtype):
    model = tiny_model(family).to(dtype)
    source = make_source(torch.tensor([5, 9, 20, 7]), model)
    assert plain_tokens(model, source) == generate(model, [source], 12)[0]


@pytest.mark.end_to_end
@pytest.mark.parametrize("family", ["llama", "bart"])
def test_off_loaded_and_compiled_models_are_decoded_as_generate_decodes_them(family):
    model = tiny_model(family)
    source = make_source(torch.tensor([5, 9, 20, 7]), model)
    [expected] = generate(model, [source], 12)
    if family == "llama":
        assert plain_tokens(torch.compile(model, backend="eager"), source) == expected
    accelerate.cpu_offload(model, execution_device="cpu")
    assert plain_tokens(model, source) == expected


def test_activations_that_are_quantised_by_the_call_are_refused():
    """Their scale depends on all tokens of a call, so a row depends on later tokens."""
    model = quantize_dynamic(tiny_model("llama").float(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match="'llama' model .* quantises per call"):
        CachedModel(model)
