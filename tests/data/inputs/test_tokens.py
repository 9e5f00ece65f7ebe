"""Tokenisation of prompts: BOS is kept, EOS removed, and chats get special tokens once."""

import json

import datasets
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from drafttrain.config.base import ConfigError
from drafttrain.data.inputs.chats import Refused
from drafttrain.data.inputs.tokens import check_chats, tokenize_prompts, tokenize_texts
from tests.tiny_models import BOS, EOS

TEMPLATE = (
    "<s> {% for turn in messages %}{{ turn.role }} {{ turn.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
WORDS = {"<pad>": 0, "</s>": EOS, "<unk>": 2, "<s>": BOS, "user": 4, "assistant": 5, "system": 6}
WORDS |= {word: 7 + i for i, word in enumerate(("a", "b", "c"))}


def tokenizer(single: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """Returns a word tokenizer with a post-processor that adds tokens around a text."""
    fast = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("<s>", BOS), ("</s>", EOS)]
    fast.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    names = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=fast, chat_template=template, **names)


def chats(*messages: list[dict[str, str]]) -> datasets.Dataset:
    given = [json.dumps({"conversation": turns}) if turns else None for turns in messages]
    reason = [None if turns else "empty" for turns in messages]
    rows = {"row": list(range(len(messages))), "chat": given, "reason": reason}
    return datasets.Dataset.from_dict(rows)


USER = {"role": "user", "content": "a b"}

AROUND = {"$A": [7, 8], "<s> $A": [BOS, 7, 8], "<s> $A </s>": [BOS, 7, 8], "$A </s>": [7, 8]}


@pytest.mark.parametrize("single", AROUND)
def test_a_prompt_keeps_bos_and_never_gets_eos(single):
    assert tokenize_texts(tokenizer(single), ["a b"], decoder_only=True) == [AROUND[single]]
    assert tokenize_texts(tokenizer(single), ["", " ", "a"], decoder_only=True)[:2] == [[], []]
    whole = tokenizer(single)(["a b"])["input_ids"]
    assert tokenize_texts(tokenizer(single), ["a b"], decoder_only=False) == whole
    [written] = tokenize_texts(tokenizer(single), ["a </s>"], decoder_only=True)
    assert written == [*AROUND[single][:-1], EOS]  # an EOS in the text is kept
    assert tokenize_texts(tokenizer(single), [], decoder_only=True) == []


def test_a_chat_is_rendered_once_with_special_tokens_once():
    system = {"role": "system", "content": "c"}
    words = tokenizer("<s> $A </s>", TEMPLATE)
    *found, empty = tokenize_prompts(words, chats([USER], [system, USER], []), decoder_only=True)
    assert found == [[BOS, 4, 7, 8, EOS, 5], [BOS, 6, 9, EOS, 4, 7, 8, EOS, 5]]
    assert empty.reason == "empty"  # could not be read


def test_plain_rows_go_without_the_template():
    rows = datasets.Dataset.from_dict({"row": [0], "source": ["a b"], "reason": [None]})
    words = tokenizer("<s> $A", TEMPLATE)
    assert tokenize_prompts(words, rows, decoder_only=True, limits={"few fit": 3}) == [[BOS, 7, 8]]
    [long] = tokenize_prompts(words, rows, decoder_only=True, limits={"few fit": 2})
    assert long.reason == "3 tokens where few fit"
    assert tokenize_prompts(words, rows, decoder_only=True, vocabulary=9) == [[BOS, 7, 8]]
    [beyond] = tokenize_prompts(words, rows, decoder_only=True, vocabulary=8)
    assert beyond.reason == "token 8, the target has 8 tokens"


def test_chats_need_a_template_and_a_decoder_only_target():
    with pytest.raises(ConfigError, match=r"no chat template; put a chat_template.jinja"):
        check_chats(tokenizer("<s> $A"), chats([USER]), decoder_only=True)
    with pytest.raises(ConfigError, match=r"encoder-decoder target needs one text a row"):
        check_chats(tokenizer("$A", TEMPLATE), chats([USER]), decoder_only=False)


REFUSALS = {
    "roles must alternate": "{{ raise_exception('roles must alternate') }}",
    "can only concatenate": "{{ messages[0].content + messages[0].other }}",
    "no attribute": "{{ messages[0].other.more }}",
}


@pytest.mark.parametrize("words", REFUSALS)
def test_a_chat_that_the_template_refuses_ends_no_run(words):
    strict = "{% if messages[0].content == 'a b' %}" + REFUSALS[words] + "{% endif %}a"
    other = {"role": "user", "content": "c"}
    found = tokenize_prompts(tokenizer("$A", strict), chats([USER], [other]), decoder_only=True)
    assert isinstance(found[0], Refused) and "refuses it" in found[0].reason
    assert found[1] == [7]
    broken, words = USER | {"role": "user\ud83d"}, tokenizer("$A", TEMPLATE)
    [half, whole] = tokenize_prompts(words, chats([broken], [USER]), decoder_only=True)
    assert "half of a surrogate pair" in half.reason and whole == [BOS, 4, 7, 8, EOS, 5]


def test_tools_and_settings_are_read_by_the_template():
    template = "{{ tools[0].name if tools else 'c' }} {{ 'a' if thinking else 'b' }}"
    given = [{"tools": [{"name": "a"}], "chat_template_kwargs": {"thinking": True}}, {}]
    given = [json.dumps({"conversation": [USER]} | one) for one in given]
    rows = datasets.Dataset.from_dict({"row": [0, 1], "chat": given, "reason": [None, None]})
    found = tokenize_prompts(tokenizer("$A", template), rows, decoder_only=True)
    assert found == [[7, 7], [9, 8]]
    with pytest.raises(ConfigError, match=r"chat_template_kwargs.thinking.*leave it out"):
        check_chats(tokenizer("$A", "a"), rows, decoder_only=True)
