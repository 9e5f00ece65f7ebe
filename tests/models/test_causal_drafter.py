"""Causal drafters: initialisation, and what is refused before weights are read."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    SmolLM3Config,
)

from drafttrain.config.base import ConfigError
from drafttrain.config.kinds import CAUSAL, kind_of
from drafttrain.config.recipes import CausalDrafterRecipe
from drafttrain.models.causal_drafter import (
    chosen_layers,
    demote_undrafted,
    draftable_tokens,
    empty_drafter,
    freeze,
    start_drafter,
)
from drafttrain.models.language_models import layer_stem, shallow_config, take_layers
from tests.comparing import close, same_weights
from tests.tiny_models import CAUSAL_FAMILIES, CAUSAL_SHAPE, EOS, VOCAB, tiny_model
from tests.tiny_targets import save_target

IDS = torch.tensor([[5, 6, 7, 8]])


def recipe(**groups: object) -> CausalDrafterRecipe:
    places = {"run": "run", "target": {"path": "TARGET"}, "data": {"path": "rows.jsonl"}}
    return CausalDrafterRecipe.model_validate(places | groups)


def deep(family: str = "llama", layers: int = 5) -> PreTrainedModel:
    return tiny_model(family, num_hidden_layers=layers)


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"drafter": {"layers": 3}}, [0, 2, 4]),
        ({"drafter": {"layers": 1}}, [4]),
        ({"initialise": {"layers": [0, 4, 4]}}, [0, 4, 4]),
    ],
)
def test_layers_are_chosen_by_place_or_by_number(settings, layers):
    assert chosen_layers(recipe(**settings), deep().config) == layers


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_a_drafter_of_two_layers_is_the_target_without_the_others(family):
    target = deep(family, 4)
    drafter = start_drafter(recipe(initialise={"layers": [1, 3]}), target)
    stack = target.get_submodule(layer_stem(target).removesuffix("."))
    del stack[2], stack[0]
    target.config.num_hidden_layers = 2
    for number, layer in enumerate(stack):
        for part in layer.modules():
            if getattr(part, "layer_idx", None) is not None:
                part.layer_idx = number
    close(drafter(IDS).logits.double(), target(IDS, use_cache=False).logits, 1e-4)
    assert drafter.dtype == torch.float32 and type(drafter) is type(target)
    assert drafter.config.num_hidden_layers == 2
    assert drafter.config.target == {"path": "TARGET"}
    assert drafter.generation_config.eos_token_id == EOS


def test_a_drafter_with_tied_embeddings_keeps_them_tied(tmp_path):
    target = deep("llama", 3)
    target.config.tie_word_embeddings = True
    target.tie_weights()
    drafter = start_drafter(recipe(), target)
    drafter.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight and same_weights(drafter, again)
    freeze(drafter, ["output"])
    assert not drafter.model.embed_tokens.weight.requires_grad
    assert drafter.model.layers[0].mlp.up_proj.weight.requires_grad


@pytest.mark.parametrize("rows", [VOCAB - 4, VOCAB + 8])
def test_another_padding_of_the_vocabulary_becomes_that_of_the_target(tmp_path, rows):
    donor = tiny_model("gpt2", vocab_size=rows)
    save_target(donor, tmp_path)
    settings = recipe(initialise={"path": str(tmp_path)})
    drafter = start_drafter(settings, deep())
    assert drafter.config.vocab_size == VOCAB == drafter(IDS).logits.shape[-1]
    shared = min(rows, VOCAB)
    close(drafter(IDS).logits[..., :shared].double(), donor(IDS).logits[..., :shared], 1e-4)
    with torch.device("meta"):
        planned = empty_drafter(settings, deep().config)
    assert planned.num_parameters() == drafter.num_parameters()
    if rows < VOCAB:  # new rows are the mean of the others
        mean = donor.lm_head.weight.mean(0).expand(VOCAB - rows, -1)
        close(drafter.lm_head.weight[rows:].double(), mean, 1e-6)


def test_draftable_tokens_are_read_from_the_configuration():
    config = tiny_model("llama").config
    assert draftable_tokens(config, VOCAB) is None
    config.draftable_tokens = [1, 5, 9]
    assert draftable_tokens(config, VOCAB).tolist() == [1, 5, 9]
    for wrong in ([], [5, 1], [1, 1], [-1, 3], [1, VOCAB]):
        config.draftable_tokens = wrong
        with pytest.raises(ConfigError, match="not a rising list of tokens below 40; delete"):
            draftable_tokens(config, VOCAB)


def test_a_parallel_drafter_to_start_from_becomes_one_that_drafts_any_token_by_token(tmp_path):
    donor = tiny_model("llama")
    donor.config.pard_token, donor.config.k, donor.config.draftable_tokens = 3, 4, [1, 5]
    save_target(donor, tmp_path)
    settings = recipe(initialise={"path": str(tmp_path)})
    config = start_drafter(settings, deep()).config
    assert kind_of(config) is CAUSAL and draftable_tokens(config, VOCAB) is None
    assert empty_drafter(settings, deep().config).config.pard_token == 3  # which the next may keep


@pytest.mark.parametrize(
    ("family", "tied"), [*((family, False) for family in CAUSAL_FAMILIES), ("llama", True)]
)
def test_tokens_that_are_not_drafted_never_win_and_the_others_score_as_before(family, tied):
    model = tiny_model(family, tie_word_embeddings=tied)
    drafted = torch.tensor([EOS, 6, 7, 11, 20])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, VOCAB, (8, 12), generator=generator)
    before, embeddings = model(ids).logits, model.get_input_embeddings().weight.clone()
    assert not torch.isin(before.argmax(-1), drafted).all()
    assert demote_undrafted(model) == 0  # all tokens are drafted
    model.config.draftable_tokens = drafted.tolist()
    assert demote_undrafted(model) == VOCAB - len(drafted)
    after = model(ids).logits
    close(after[..., drafted], before[..., drafted], 1e-6)
    assert torch.equal(after.argmax(-1), drafted[before[..., drafted].argmax(-1)])
    close(after[..., 5], before[..., drafted].mean(-1), 1e-5)
    assert torch.equal(model.get_input_embeddings().weight, embeddings)


SMALL = CAUSAL_SHAPE | {"num_hidden_layers": 4, "num_key_value_heads": 2}
EXPERTS = SMALL | {"moe_intermediate_size": 8, "n_routed_experts": 2, "num_experts_per_tok": 1}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SmolLM3Config(**SMALL, no_rope_layers=[1, 1, 0, 1]), {"no_rope_layers": [1, 0]}),
        (Glm4MoeConfig(**EXPERTS, first_k_dense_replace=1), {"first_k_dense_replace": 1}),
        (Glm4MoeConfig(**EXPERTS, first_k_dense_replace=3), {"first_k_dense_replace": 2}),
        (
            Ernie4_5_MoeConfig(**SMALL, moe_intermediate_size=8, moe_num_experts=2, moe_k=1),
            {"moe_layer_start_index": 1, "moe_layer_end_index": 1},
        ),
        (
            Qwen2MoeConfig(**SMALL, num_experts=2, num_experts_per_tok=1, mlp_only_layers=[1, 2]),
            {"mlp_only_layers": [1]},
        ),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else "",
)
def test_per_layer_settings_are_cut_with_the_layers(config, expected):
    """The target's weights of layers 0 and 2 fit the layers of the drafter."""
    target = AutoModelForCausalLM.from_config(config).eval()
    shallow = shallow_config(config, [0, 2])
    assert {name: getattr(shallow, name) for name in expected} == expected
    drafter = AutoModelForCausalLM.from_config(shallow)
    drafter.load_state_dict(take_layers(target.state_dict(), layer_stem(target), [0, 2]))


def test_experts_at_an_interval_of_layers_are_refused():
    config = Qwen2MoeConfig(**SMALL, decoder_sparse_step=2)
    with pytest.raises(ConfigError, match="decoder_sparse_step = 2 counts layers"):
        shallow_config(config, [0, 2])
