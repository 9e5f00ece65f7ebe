"""custom_generate: the tokens of `generate`, from a folder with drafter, head and policy."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedModel,
    TemperatureLogitsWarper,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from drafttrain.export.generation import generate, prepare
from drafttrain.models.spec_drafter.model import SpecDrafter
from tests.comparing import same_weights
from tests.export.pairs import export_to, make_head, noisy_copy, save_spec_drafter
from tests.tiny_models import FAMILIES, PAD, tiny_model

LEFT_PADDED = {
    "input_ids": torch.tensor([[PAD, PAD, 9, 14], [3, 22, 8, 31], [PAD, 5, 5, 17]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]),
}
RIGHT_PADDED = {
    "input_ids": torch.tensor([[9, 14, 1, PAD], [22, 8, 31, 1], [17, 1, PAD, PAD]]),
    "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]),
}
ONE = {"input_ids": torch.tensor([[3, 9, 22]])}
GREEDY = {"max_new_tokens": 16, "do_sample": False}
SAMPLED = {"max_new_tokens": 16, "do_sample": True, "top_k": 10}


@pytest.fixture
def assistant(exported) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(exported).eval()


def test_custom_generate_of_the_folder_equals_greedy_generate(exported, assistant, own_modules):
    """With the drafter or its folder passed, or found in the moved folder and loaded once."""
    target = tiny_model("llama")
    plain = target.generate(**LEFT_PADDED, **GREEDY)
    for given in (str(exported), exported):
        assert torch.equal(generate(target, **LEFT_PADDED, **GREEDY, assistant_model=given), plain)
    wanted = GREEDY | {"custom_generate": str(exported), "trust_remote_code": True}
    assert torch.equal(target.generate(**LEFT_PADDED, **wanted, assistant_model=assistant), plain)
    assert torch.equal(target.generate(**LEFT_PADDED, **wanted), plain)
    first = prepare(target, None, None, str(exported))
    assert torch.equal(target.generate(**LEFT_PADDED, **wanted), plain)
    assert prepare(target, None, None, str(exported)) is first


def test_policy_and_head_of_the_drafters_folder_are_used(exported, assistant):
    pair = prepare(tiny_model("llama"), assistant, None)
    assert pair.stop.name == "head(0.7)"
    assert same_weights(pair.stop.continues.head, make_head(noisy_copy("llama")))


@pytest.mark.parametrize("inputs", [LEFT_PADDED, RIGHT_PADDED], ids=["left", "right"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-neox", "marian", "t5"])
def test_rows_padded_on_either_side_have_the_outputs_of_greedy_generate_alone(family, inputs):
    target, drafter = tiny_model(family), noisy_copy(family)
    ids, mask = inputs.values()
    first = 1 if target.config.is_encoder_decoder else ids.shape[1]
    sources = [own[seen][None] for own, seen in zip(ids, mask.bool(), strict=True)]
    outputs = [target.generate(source, **GREEDY)[0].tolist() for source in sources]
    for size in (None, 1, 2):
        batch = generate(target, **inputs, **GREEDY, assistant_model=drafter, batch_size=size)
        assert first == 1 or torch.equal(batch[:, :first], ids)
        for row, source, output in zip(batch[:, first:].tolist(), sources, outputs, strict=True):
            alone = output[min(first, source.shape[1]) :]
            assert row[: len(alone)] == alone
            assert set(row[len(alone) :]) <= {PAD}, "results are padded on the right"


@pytest.mark.parametrize(
    ("family", "shape"),
    [*((one, {}) for one in FAMILIES), ("marian", {"encoder": "target", "output_tokens": 30})],
)
def test_an_exported_spec_drafter_equals_greedy_generate(tmp_path, family, shape):
    target = tiny_model(family)
    drafter = save_spec_drafter(tmp_path / "drafter", target, tmp_path, **shape)
    out = export_to(tmp_path / "out", drafter=str(drafter))
    reloaded = SpecDrafter.from_pretrained(out)
    plain = target.generate(**RIGHT_PADDED, **GREEDY)
    assert torch.equal(generate(target, **RIGHT_PADDED, **GREEDY, assistant_model=reloaded), plain)
    assert prepare(target, reloaded, None).stop.name == "k=4"


@pytest.mark.parametrize(
    "settings",
    [
        {"max_length": 11, "do_sample": False},
        {"do_sample": False},
        GREEDY | {"eos_token_id": [7, 12]},
        GREEDY | {"repetition_penalty": 1.7},
        GREEDY | {"min_new_tokens": 9},
        GREEDY | {"min_length": 12},
        GREEDY | {"bad_words_ids": [[20], [11]], "no_repeat_ngram_size": 2},
    ],
    ids=lambda settings: ",".join(name for name in settings if name != "do_sample") or "defaults",
)
def test_call_settings_act_as_in_generate(assistant, settings):
    target = tiny_model("llama")
    plain = target.generate(**ONE, **settings)
    assert torch.equal(generate(target, **ONE, **settings, assistant_model=assistant), plain)


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        ({"stop": "fixed", "k": 3}, "k=3"),
        ({"stop": "entropy", "entropy": 1.5, "max_draft": 8}, "entropy(1.5)"),
        ({"stop": "confidence", "confidence": 0.3}, "confidence(0.3)"),
        ({"stop": "head", "h": 0.4, "max_draft": 6}, "head(0.4)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_policy_changes_the_rounds_but_not_the_tokens(assistant, policy, name):
    target = tiny_model("llama")
    plain = target.generate(**ONE, **GREEDY)
    drafted = generate(target, **ONE, **GREEDY, assistant_model=assistant, policy=policy)
    assert torch.equal(drafted, plain)
    assert prepare(target, assistant, policy).stop.name == name


def test_sampling_follows_torchs_seed(assistant):
    target = tiny_model("llama")

    def sample(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return generate(target, **ONE, **SAMPLED, num_return_sequences=4, assistant_model=assistant)

    first = sample(1)
    assert len(first) == 4
    assert torch.equal(first, sample(1))
    assert not torch.equal(first, sample(2))
    assert len({tuple(row.tolist()) for row in first}) > 1
    for narrow in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        best = generate(target, **ONE, **(SAMPLED | narrow), assistant_model=assistant)
        assert torch.equal(best, target.generate(**ONE, **GREEDY))


def test_a_streamer_gets_the_prompt_and_every_token_once(assistant):
    streamer, target = mock.Mock(spec=BaseStreamer), tiny_model("llama")
    wanted = {"streamer": streamer, "return_dict_in_generate": True, "assistant_model": assistant}
    output = generate(target, **ONE, **GREEDY, **wanted)
    assert isinstance(output, GenerateDecoderOnlyOutput)
    assert torch.equal(output.sequences, target.generate(**ONE, **GREEDY))
    given = [call.args[0].flatten() for call in streamer.put.call_args_list]
    assert torch.equal(torch.cat(given), output.sequences[0])
    streamer.end.assert_called_once()


def test_a_pair_is_wrapped_once_until_something_changes(assistant):
    target = tiny_model("llama")
    first = prepare(target, assistant, None)
    assert prepare(target, assistant, None) is first
    assert prepare(target, assistant, {"stop": "fixed", "k": 2}) is not first
    other = noisy_copy("llama")
    assert prepare(target, other, None).assistant is other
    assert prepare(target, other, None).stop.name == "k=4"
    other.generation_config.num_assistant_tokens = 2
    assert prepare(target, other, None).stop.name == "k=2"
    policy = {"stop": "fixed", "k": 3}
    prepare(target, other, policy)
    policy["k"] = 6  # in place
    assert prepare(target, other, policy).stop.name == "k=6"
    for wrong in (-3, 2.5):
        other.generation_config.num_assistant_tokens = wrong
        with pytest.raises(ValueError, match=f"num_assistant_tokens = {wrong}; set it to"):
            prepare(target, other, None)


def test_a_copy_of_a_target_makes_its_own_pair(assistant):
    target = tiny_model("llama")
    plain = generate(target, **ONE, **GREEDY, assistant_model=assistant)
    for other in (copy.deepcopy(target), copy.copy(target), pickle.loads(pickle.dumps(target))):
        pair = prepare(other, assistant, None)
        assert pair.target.model is other
        assert torch.equal(generate(other, **ONE, **GREEDY, assistant_model=assistant), plain)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_beams": 4}, "num_beams = 4"),
        ({"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(2.0)])}, "logits_proc"),
        ({"stopping_criteria": [MaxTimeCriteria(1.0)]}, "stopping_criteria is not supported"),
        ({"assistant_tokenizer": "any"}, "assistant_tokenizer is not supported"),
        ({"output_scores": True}, "output_scores is not available"),
        ({"past_key_values": "any"}, "past_key_values is not supported"),
        ({"max_new_tokenz": 3}, "max_new_tokenz is not supported"),
        ({"num_return_sequences": 2}, "do not support `num_return_sequences`"),
        ({"do_sample": True, "typical_p": 0.5}, "typical_p"),
        ({"max_time": 3.0}, r"^max_time = 3\.0 is not supported .* leave it out of the call"),
        ({"stop_strings": ["x"]}, r"^stop_strings = \['x'\] .* leave it out of the call"),
        ({"guidance_scale": 2.0}, r"^guidance_scale = 2\.0 .* leave it out of the call"),
        ({"generation_config": GenerationConfig(max_time=3.0)}, "^max_time = .* of the call"),
        ({"do_sample": True, "temperature": 0.0}, "do_sample=False for greedy"),
        ({"do_sample": True, "policy": {"stop": "confidence", "confidence": 0.4}}, "own value"),
        ({"policy": {"stop": "head"}}, "no h; add h"),
        ({"policy": {"stop": "heads"}}, "policy .*stop = 'heads'"),
        ({"max_length": 2}, "allows no new token"),
        ({"attention_mask": torch.ones(1, 2)}, r"must be .* \(1, 3\) .*, not shape \(1, 2\)"),
        ({"attention_mask": [[1, 1, 1]]}, r"must be a tensor .*, not \[\[1, 1, 1\]\]"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "row 0 .* padding between its tokens"),
        ({"batch_size": 0}, "batch_size = 0; give an integer from 1"),
        ({"batch_size": "2"}, "batch_size = '2'; give an integer"),
        ({"attention_mask": torch.zeros(1, 3)}, "row 0 of the inputs holds no tokens"),
        ({"input_ids": torch.tensor([3, 9])}, "must be integers of shape"),
        ({"input_ids": None}, "not nothing"),
        ({"input_ids": [[3, 9]]}, "input_ids must be a tensor .* not a list"),
        ({"input_ids": torch.tensor([[3, 99]])}, "row 0 .* the token 99, but .* 0 to 39"),
        ({"input_ids": torch.tensor([[3, -1]])}, "row 0 .* has the token -1"),
        ({"do_sample": True, "top_k": -1}, "top_k = -1, .*at least 0"),
        ({"do_sample": True, "min_p": 3.0}, r"min_p = 3\.0; .*from 0 to 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_settings_are_refused_by_name(assistant, settings, says):
    with pytest.raises(ValueError, match=says) as error:
        generate(tiny_model("llama"), **(ONE | settings), assistant_model=assistant)
    assert "\n" not in str(error.value)


def test_a_setting_of_the_target_is_not_blamed_on_the_call(assistant):
    target = tiny_model("llama")
    target.generation_config.max_time = 3.0
    with pytest.raises(ValueError, match="the target's generation_config sets max_time=3.0"):
        generate(target, **ONE, assistant_model=assistant)
    target.generation_config.max_time = None
    assert generate(target, **ONE, **GREEDY, assistant_model=assistant, max_time=None).shape[1] > 3


@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        (lambda: None, "assistant_model is missing"),
        (lambda: "/no/such/drafter", "'/no/such/drafter': no such folder"),
        (lambda: tiny_model("llama", vocab_size=48), "of 48 tokens but target .* has 40"),
        (lambda: tiny_model("t5"), "is an encoder-decoder model"),
    ],
)
def test_models_that_do_not_go_together_are_refused(drafter, says):
    with pytest.raises(ValueError, match=says):
        generate(tiny_model("llama"), **ONE, assistant_model=drafter())


def test_a_lossy_policy_is_followed_in_greedy_decoding_only():
    target, assistant = tiny_model("llama"), tiny_model("llama", seed=8)
    anything = {"kind": "spec-verification", "beta": 40, "tau": 1e9}
    lossy = {"stop": "fixed", "k": 4, "verifier": anything}
    drafted = generate(target, **ONE, **GREEDY, assistant_model=assistant, policy=lossy)
    own = assistant.generate(**ONE, **GREEDY)
    length = ONE["input_ids"].shape[1]
    assert torch.equal(drafted[:, : length + 4], own[:, : length + 4])  # whatever it drafts
    assert not torch.equal(drafted, target.generate(**ONE, **GREEDY))
    best = SAMPLED | {"top_k": 1}  # sampling stays exact
    sampled = generate(target, **ONE, **best, assistant_model=assistant, policy=lossy)
    assert torch.equal(sampled, target.generate(**ONE, **GREEDY))
