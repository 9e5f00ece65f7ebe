"""Prompts become tokens by one rule: BOS stays, EOS goes, chats get special tokens once."""

from __future__ import annotations

import datasets
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from drafttrain.config.base import ConfigError
from drafttrain.data.inputs.rows import check_chats, tokenize_prompts, tokenize_texts
from tests.tiny_models import BOS, EOS
from tests.tiny_targets import tiny_tokenizer

TEMPLATE = (
    "<s> {% for turn in messages %}{{ turn.role }} {{ turn.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
WORDS = {"<pad>": 0, "</s>": EOS, "<unk>": 2, "<s>": BOS, "user": 4, "assistant": 5, "system": 6}
WORDS |= {word: 7 + i for i, word in enumerate(("a", "b", "c"))}


def tokenizer(single: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """Words, and what a post-processor puts around a text."""
    fast = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("<s>", BOS), ("</s>", EOS)]
    fast.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    names = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=fast, chat_template=template, **names)


def chats(*messages: list[dict[str, str]]) -> datasets.Dataset:
    source = [turns[-1]["content"] if turns else "" for turns in messages]
    rows = {"row": list(range(len(messages))), "source": source, "messages": list(messages)}
    return datasets.Dataset.from_dict(rows)


USER = {"role": "user", "content": "a b"}

AROUND = {
    "$A": [7, 8],
    "<s> $A": [BOS, 7, 8],
    "<s> $A </s>": [BOS, 7, 8],
    "$A </s>": [7, 8],
}


@pytest.mark.parametrize("single", AROUND)
def test_a_prompt_keeps_bos_and_never_gets_eos(single):
    assert tokenize_texts(tokenizer(single), ["a b"], decoder_only=True) == [AROUND[single]]
    whole = tokenizer(single)(["a b"])["input_ids"]
    assert tokenize_texts(tokenizer(single), ["a b"], decoder_only=False) == whole


def test_an_end_that_the_text_itself_writes_stays():
    assert tokenize_texts(tokenizer("<s> $A </s>"), ["a </s>"], decoder_only=True) == [
        [BOS, 7, EOS]
    ]


def test_a_text_without_tokens_gives_none_at_all():
    for single in AROUND:
        assert tokenize_texts(tokenizer(single), ["", " ", "a"], decoder_only=True)[:2] == [[], []]
    assert tokenize_texts(tokenizer("$A"), [], decoder_only=True) == []


def test_a_chat_is_rendered_once_with_special_tokens_once():
    system = {"role": "system", "content": "c"}
    words = tokenizer("<s> $A </s>", TEMPLATE)
    assert tokenize_prompts(words, chats([USER], [system, USER]), decoder_only=True) == [
        [BOS, 4, 7, 8, EOS, 5],
        [BOS, 6, 9, EOS, 4, 7, 8, EOS, 5],
    ]


def test_a_chat_without_a_users_turn_has_no_tokens():
    words = tokenizer("<s> $A", TEMPLATE)
    assert tokenize_prompts(words, chats([USER], []), decoder_only=True)[1] == []


def test_plain_rows_go_without_the_template():
    rows = datasets.Dataset.from_dict({"row": [0], "source": ["a b"]})
    assert tokenize_prompts(tokenizer("<s> $A", TEMPLATE), rows, decoder_only=True) == [[BOS, 7, 8]]


def test_chats_need_a_template_and_a_decoder_only_target():
    with pytest.raises(ConfigError, match=r"no chat template; put a chat_template.jinja"):
        tokenize_prompts(tokenizer("<s> $A"), chats([USER]), decoder_only=True)
    with pytest.raises(ConfigError, match=r"encoder-decoder target needs one text a row"):
        check_chats(tokenizer("$A", TEMPLATE), chats([USER]), decoder_only=False)
    check_chats(tiny_tokenizer(), datasets.Dataset.from_dict({"source": ["a"]}), decoder_only=True)


def test_a_chat_that_the_template_refuses_is_named_by_its_row():
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match=r"row 0: .*refuses this chat \(roles must alternate\)"):
        tokenize_prompts(tokenizer("$A", strict), chats([USER]), decoder_only=True)
