"""Tiny multilingual targets on disk, with tokenizers like NLLB's, M2M100's and mBART-50's."""

import json
from pathlib import Path

import sentencepiece
import torch
from transformers import (
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    NllbTokenizer,
    PreTrainedTokenizerBase,
)

from tests.tiny_models import BART_SHAPE
from tests.tiny_targets import random_sentences

LANGUAGES = {
    "nllb": ("eng_Latn", "deu_Latn"),
    "m2m100": ("en", "de"),
    "mbart50": ("en_XX", "de_DE"),
}
"""Source and target language, in the codes of each kind."""
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
PIECES = ["▁", "w", *"0123456789"]


def language_tokenizer(kind: str, folder: Path) -> PreTrainedTokenizerBase:
    """Returns a character tokenizer for `random_sentences`; some kinds need files in `folder`."""
    if kind == "nllb":
        vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *PIECES])}
        return NllbTokenizer(vocab=vocabulary, merges=[])
    if kind == "mbart50":
        own = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
        return MBart50Tokenizer(vocab=own + [(piece, -2.0) for piece in PIECES])
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(random_sentences(40)),
        model_prefix=str(folder / "pieces"),
        vocab_size=len(PIECES) + 3,
        model_type="char",
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "pieces.model"))
    pieces = [model.id_to_piece(number) for number in range(3, model.get_piece_size())]
    vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *pieces])}
    (folder / "pieces.json").write_text(json.dumps(vocabulary))
    return M2M100Tokenizer(str(folder / "pieces.json"), str(folder / "pieces.model"))


def save_language_target(kind: str, folder: Path) -> Path:
    """Saves a target for `load_target`: a random model with decoder start token </s>."""
    folder.mkdir(parents=True)
    tokenizer = language_tokenizer(kind, folder)
    shape = BART_SHAPE | {"vocab_size": 300, "decoder_start_token_id": 2, "scale_embedding": True}
    shape |= {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(5)
    if kind == "mbart50":
        model = MBartForConditionalGeneration(MBartConfig(**shape))
    else:
        model = M2M100ForConditionalGeneration(M2M100Config(**shape))
    torch.nn.init.normal_(model.get_output_embeddings().weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"  # published ones name no source language
    file.write_text(json.dumps(json.loads(file.read_text()) | {"src_lang": None}))
    return folder
