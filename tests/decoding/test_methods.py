"""All methods on tiny models, in float64: a sequence of a batch is decoded as it is alone.

Greedy outputs are those of `generate`. A row of a batch follows the target's distribution exactly:
enumerates every random outcome of one row, while rows of other lengths draw from their own random
streams. Drafters with more or fewer embedding rows than their target are exact.
"""

from functools import cache, partial

import pytest
import torch
from torch import Tensor
from transformers import NoBadWordsLogitsProcessor, PreTrainedModel

from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.drafters.tree import TreeDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.roles import Drafter, StopPolicy
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import Entropy, FixedLength
from drafttrain.decoding.trees.chosen import Optimal
from drafttrain.decoding.trees.fixed import Fixed
from drafttrain.decoding.types import Output, Sampling, Source
from drafttrain.decoding.verifiers import BlockVerification
from tests.decoding.decoded import decoder_of, generate, sources_for, tokens_of
from tests.decoding.enumeration import enumerate_output, total_variation
from tests.decoding.expected import Law, law_of_sampling
from tests.decoding.methods import EVERY, METHODS, near, tree, with_rows
from tests.tiny_drafters import drafter_of, shared
from tests.tiny_models import CAUSAL_FAMILIES, FAMILIES, SPEECH_FAMILIES, VOCAB, tiny_model

NEW, SEQUENCES = 10, 4
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.6, top_k=20)


@cache
def target_of(family: str, embeddings: str) -> tuple[CachedModel, list[list[int]]]:
    """Returns a target and its greedy outputs."""
    model = tiny_model(family) if embeddings == "untied" else shared(family)
    return CachedModel(model), generate(model, sources_for(model, SEQUENCES), NEW)


def decode(
    target: CachedModel,
    drafter: Drafter,
    sampling: Sampling = GREEDY,
    batch_size: int = 2,
    stop: StopPolicy | int = 4,
) -> list[Output]:
    seeded = partial(sequence_randomness, 4)
    decoder = decoder_of(target, drafter, stop, None, sampling, seeded)
    return decoder.decode_all(sources_for(target.model, SEQUENCES), NEW, batch_size)


def check(
    family: str,
    name: str,
    sampling: Sampling = GREEDY,
    stop: StopPolicy | int = 4,
    embeddings: str = "shared",
) -> None:
    """Three rows at once: the last of the sequences gets the row of one that has ended."""
    target, expected = target_of(family, embeddings)
    drafter = METHODS[name](target.model, near)
    each, found = (decode(target, drafter, sampling, size, stop) for size in (1, 3))
    assert not sampling.greedy or tokens_of(each) == expected
    assert any(played.drafted for one in each for played in one.rounds) or name == "plain"
    for one, other in zip(found, each, strict=True):
        assert [p.drafted for p in one.rounds] == [p.drafted for p in other.rounds]
        assert one.tokens == other.tokens


CASES = [(family, name) for family, names in EVERY.items() for name in names]
CASES += [("whisper", name) for name in ("slots in turn", "rsd-c over slots")]


@pytest.mark.covered
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("family", "name"), CASES)
def test_sequences_of_a_batch_are_decoded_as_alone(family, name, sampling):
    if not (name == "several" and sampling.greedy):  # independent drafts need sampling
        check(family, name, sampling, embeddings="untied" if family == "llama" else "shared")


@pytest.mark.parametrize("family", [*FAMILIES, *SPEECH_FAMILIES, *CAUSAL_FAMILIES])
def test_every_family_decodes_in_batches(family):
    for name in ("causal", "opt-tree"):
        check(family, name, embeddings="untied")


@pytest.mark.parametrize("rank", [0, 3], ids=["slots alone", "previous tokens"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_drafters_in_half_precision_draft_for_any_target(dtype, rank):
    target, expected = target_of("marian", "shared")
    drafter = BlockDrafter(drafter_of(target.model, previous_token_rank=rank).to(dtype))
    for draft in (drafter, TreeDrafter(drafter, Optimal(6))):
        assert tokens_of(decode(target, draft)) == expected
    assert all(tokens_of(decode(target, drafter, sampling=SAMPLED)))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["causal", "anchored"])
def test_drafts_of_several_lengths_share_their_calls(name, sampling):
    """Each sequence's policy ends its own draft while others continue."""
    check("marian", name, sampling, Entropy(2.0, 6))


PROMPTS = ([3], [2, 3, 3], [2, 2, 3, 2, 3])
FLAT = Sampling(1.5, top_k=2)
EXCLUDED = {"marian": [[0]]}
"""Tokens that the target's settings exclude, as those of opus-mt do."""
CASES = [("llama", 1, 3, name) for name in EVERY["llama"] if name != "rsd-s"]
CASES += [("marian", 2, 2, name) for name in EVERY["marian"] if "rsd-s" not in name]
CASES += [("llama", 1, 3, "causal, that stops"), ("marian", 2, 2, "anchored, that stops")]
"""Batch rows between others, and batch rows that are reused after another sequence ended."""


@cache
def small(family: str) -> CachedModel:
    """Returns a target of four tokens whose rows are so flat that all of them matter."""
    size = {"vocab_size": 4} | ({"decoder_vocab_size": 4} if family == "marian" else {})
    model = tiny_model(family, **size, tie_word_embeddings=family == "marian")
    model.lm_head.weight.data *= 0.3
    model.generation_config.bad_words_ids = EXCLUDED.get(family)
    return CachedModel(model)


def law_of_model(model: PreTrainedModel, source: Source, sampling: Sampling, longest: int) -> Law:
    """Enumerates plain sampling with the model's forward, without cache and batch."""
    words = model.generation_config.bad_words_ids
    process = NoBadWordsLogitsProcessor(words) if words else lambda path, rows: rows

    def logits(tokens: tuple[int, ...]) -> Tensor:
        path = torch.cat([source.prefix, torch.tensor(tokens, dtype=torch.long)])[None]
        given = {"input_ids": path}
        if model.config.is_encoder_decoder:
            given = {"input_ids": source.input_ids[None], "decoder_input_ids": path}
        with torch.no_grad():
            return process(path, model(**given).logits[:, -1])[0]

    return law_of_sampling(logits, sampling, longest)


@pytest.mark.covered
@pytest.mark.parametrize(("family", "place", "batch_size", "name"), CASES)
def test_a_row_in_a_batch_follows_the_target_exactly(family, place, batch_size, name):
    target = small(family)
    stop, verifier = FixedLength(1 if name == "several" else 2), None
    if name.endswith(", that stops"):
        stop, verifier = Entropy(0.6, 2), BlockVerification()
    drafter = METHODS[name.removesuffix(", that stops")](target.model, near)
    decoder = decoder_of(target, drafter, stop, verifier, FLAT)
    sources = [make_source(prompt, target.model) for prompt in PROMPTS]
    law = enumerate_output(decoder, sources, 3, place, batch_size)
    expected = law_of_model(target.model, sources[place], FLAT, 3)
    assert len(expected) > 3
    assert total_variation(law, expected) < 1e-12


PADDED = ["causal", "few tokens", "masks", "cascade", "models in turn", "opt-tree", "rsd-c"]


@pytest.mark.covered
@pytest.mark.parametrize("rows", [3, 6], ids=["smaller", "larger"])
@pytest.mark.parametrize("name", [*PADDED, "several"])
def test_outputs_of_drafters_with_other_embeddings_follow_the_target_exactly(name, rows):
    target, sampling = small("llama"), Sampling(1.0)
    drafter = METHODS[name](target.model, partial(with_rows, rows))
    decoder = decoder_of(target, drafter, 1 if name == "several" else 2, None, sampling)
    sources = [make_source(prompt, target.model) for prompt in PROMPTS[1:]]  # of tokens 2 and 3
    law = enumerate_output(decoder, sources, 2)
    expected = law_of_model(target.model, sources[0], sampling, 2)
    assert any(3 in tokens[:-1] for tokens in expected)  # the smaller model has no row for 3
    assert total_variation(law, expected) < 1e-12


@pytest.mark.covered
@pytest.mark.parametrize("rows", [VOCAB - 7, VOCAB + 8], ids=["smaller", "larger"])
@pytest.mark.parametrize("name", ["masks", "cascade", "all siblings"])
def test_drafters_with_other_embeddings_draft_no_strange_token(name, rows):
    (target, expected), known = target_of("llama", "untied"), min(rows, VOCAB)
    siblings = tree(Fixed(frozenset((n,) for n in range(known))))
    make = (METHODS | {"all siblings": siblings})[name]
    found = decode(target, make(target.model, partial(with_rows, rows)))
    assert tokens_of(found) == expected
    drafted = {token for one in found for played in one.rounds for token in played.drafted}
    if name != "cascade":  # its last level copies tokens it has read
        assert drafted and max(drafted) < known
