"""`drafttrain.load`: names or loaded models, texts or ids, batches, streaming, sampling."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import drafttrain
from drafttrain.config.base import ConfigError
from tests.small_pair import save_run
from tests.tiny_models import tiny_model, tiny_seq2seq
from tests.tiny_targets import save_target

TARGET, DRAFTER = "checkpoints/gsm8k-target", "checkpoints/gsm8k-drafter"
TEXTS = ["Tom has 3 apples and buys 4 more. How many apples?", "A box holds 6 eggs. How many in 5?"]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    tokenizer, found = AutoTokenizer.from_pretrained(TARGET), []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            whole = model.generate(ids, do_sample=False, max_new_tokens=24)
        found.append(whole[0, ids.shape[1] :].tolist())
    return found


@pytest.mark.parametrize("drafter", [DRAFTER, "max-gram", "none"])
def test_texts_are_decoded_as_generate_decodes_them(plain, drafter):
    decoder = drafttrain.load(TARGET, drafter=drafter, k=4)
    assert decoder.lossless
    for batch_size in (1, 2):
        found = decoder.generate(TEXTS, max_new_tokens=24, batch_size=batch_size)
        assert [one.tokens for one in found] == plain
    first = found[0]
    assert first.text == decoder.tokenizer.decode(plain[0], skip_special_tokens=True)
    assert first.mean_acceptance_length == len(first.tokens) / first.rounds
    assert first.accepted <= first.drafted
    if drafter == DRAFTER:
        assert first.mean_acceptance_length > 2.0
    streamed = list(decoder.stream(TEXTS[0], max_new_tokens=24))
    assert sum(streamed, []) == plain[0] and len(streamed) == first.rounds


def test_loaded_models_and_ids_need_no_folder():
    target, drafter = tiny_model("llama"), tiny_model("llama")
    decoder = drafttrain.load(target, drafter=drafter, k=3)
    [found] = decoder.generate([[5, 9, 20, 7]], max_new_tokens=12)
    ids = torch.tensor([[5, 9, 20, 7]])
    expected = target.generate(ids, do_sample=False, max_new_tokens=12)[0, 4:].tolist()
    assert found.tokens == expected and found.text is None
    assert found.mean_acceptance_length > 2.5  # the drafter is the target
    with pytest.raises(ValueError, match="texts need a tokenizer"):
        decoder.generate("a text")


def test_each_call_follows_the_targets_current_generation_config():
    target, ids = tiny_model("llama"), torch.tensor([[5, 9, 20, 7]])
    decoder, seen = drafttrain.load(target, "max-gram"), []
    for changes in ({}, {"repetition_penalty": 1.9}, {"eos_token_id": 4}):
        target.generation_config = GenerationConfig(pad_token_id=0, **changes)
        seen.append(decoder.generate(ids, max_new_tokens=12)[0].tokens)
        expected = target.generate(ids, do_sample=False, max_new_tokens=12)[0, 4:].tolist()
        assert seen[-1] == expected
    assert len(set(map(tuple, seen))) == 3


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["a", [1, 2]], "input 0 is 'a'; give texts only"),
        ({"input_ids": [[5, 6]]}, "inputs are a dict; give texts, or the rows of ids"),
        (None, "inputs are a NoneType"),
        ([[5, 6], [5, 10**6]], "input 1 has the token 1000000, but the target has the tokens 0 to"),
        ([[5, -1]], "input 0 has the token -1"),
        ([[5], 6], "input 1 is 6; give texts only"),
        ([None], "input 0 is None; give texts only"),
        (torch.tensor(5), "inputs are a Tensor; give"),
        (b"ab", "inputs are a bytes; give"),
    ],
)
def test_inputs_of_another_kind_are_refused(inputs, message):
    with pytest.raises(ValueError, match=message):
        drafttrain.load(tiny_model("llama"), None).generate(inputs)
    with pytest.raises(ValueError, match="the target reads input_features, not texts or ids"):
        drafttrain.load(tiny_model("whisper"), None).generate([[5, 6]])


def test_ids_of_one_input_need_no_outer_list():
    decoder = drafttrain.load(tiny_model("llama"), drafter=None)
    [expected] = decoder.generate([[5, 9, 20]], 6)
    for inputs in ([5, 9, 20], torch.tensor([5, 9, 20]), (ids for ids in [[5, 9, 20]])):
        assert decoder.generate(inputs, 6) == [expected]
    assert sum(decoder.stream(torch.tensor([5, 9, 20]), 6), []) == expected.tokens
    with pytest.raises(ValueError, match="2 inputs, but `stream` decodes one"):
        next(decoder.stream([[5, 9], [5, 9]]))
    for wrong in (0, None, 8.5):
        with pytest.raises(ValueError, match="max_new_tokens = .*; give an integer of at"):
            decoder.generate([5, 9, 20], max_new_tokens=wrong)
    with pytest.raises(ValueError, match="batch_size = 0; give an integer of at"):
        decoder.generate([5, 9, 20], batch_size=0)


def test_paths_load_and_wrong_arguments_are_named():
    assert drafttrain.load(Path(TARGET), Path(DRAFTER)).generate(TEXTS[0], 4)
    wrong = {"k": 0, "temperature": -1, "compile": "x", "tokenizer": TARGET}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=f"{name} = "):
            drafttrain.load(TARGET, DRAFTER, **{name: value})
    with pytest.raises(ConfigError, match="target is a Linear"):
        drafttrain.load(torch.nn.Linear(2, 2))


def test_the_folder_of_a_run_loads_its_drafter(tmp_path, monkeypatch):
    save_target(tiny_model("marian").float(), tmp_path / "target")
    run = save_run(tmp_path / "run", tmp_path / "target")
    monkeypatch.setenv("HOME", str(tmp_path))
    [found], [expected] = (
        drafttrain.load("~/target", folder).generate("w5 w6 w7", 8)
        for folder in ("~/run", run / "final")
    )
    assert found == expected and found.drafted > 0


def test_sampling_is_repeated_by_its_seed_and_settings_are_checked():
    settings = {"k": 3, "temperature": 1.0, "top_k": 20}
    tokens = [
        drafttrain.load(TARGET, DRAFTER, seed=seed, **settings).generate(TEXTS[0], 16)[0].tokens
        for seed in (1, 1, 2)
    ]
    assert tokens[0] == tokens[1] != tokens[2]
    with pytest.raises(ValueError, match="needs greedy decoding"):
        drafttrain.load(TARGET, DRAFTER, temperature=1.0, verifier="greedy")
    for given in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        with pytest.raises(ConfigError, match=f"{next(iter(given))} = .* only with temperature"):
            drafttrain.load(TARGET, DRAFTER, **given)


def test_max_gram_copies_no_source_token_that_the_decoder_lacks():
    """A Marian model may have two vocabularies: here 40 tokens, of which the decoder has 36."""
    target = tiny_seq2seq("two vocabularies")
    inputs = [[token, 38, 39] for token in range(4, 36)]
    plain, copied = (
        [one.tokens for one in drafttrain.load(target, name).generate(inputs, 5, batch_size=32)]
        for name in (None, "max-gram")
    )
    assert copied == plain
