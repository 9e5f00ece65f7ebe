"""A tiny target on disk: a random model and a tokenizer for the words w4 ... w39."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from drafttrain.config.inputs import TargetConfig
from tests.tiny_models import BOS, EOS, PAD, UNK, VOCAB


def tiny_tokenizer(shuffled: bool = False, end: bool = True) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per word. shuffled: w4 and w5 are exchanged. end: EOS
    after every input."""
    words = {"<pad>": PAD, "</s>": EOS, "<unk>": UNK, "<s>": BOS}
    words |= {f"w{token}": token for token in range(len(words), VOCAB)}
    if shuffled:
        words |= {"w4": words["w5"], "w5": words["w4"]}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", EOS)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        bos_token="<s>",
    )


def save_target(model: PreTrainedModel, folder: Path) -> Path:
    """Saves a target for `load_target`."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def target_at(folder: Path | str, **settings: object) -> TargetConfig:
    """Returns the settings of a target in a folder, on the CPU."""
    return TargetConfig(path=str(folder), device="cpu", **settings)


def random_sentences(count: int, longest: int = 9) -> list[str]:
    """Returns sentences of 1 to `longest` words that the tokenizer knows."""
    return [
        " ".join(f"w{4 + (7 * i + 11 * j * (i + 1)) % (VOCAB - 4)}" for j in range(1 + i % longest))
        for i in range(count)
    ]
