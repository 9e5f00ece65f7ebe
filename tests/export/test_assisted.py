"""An exported shallow decoder drafts in plain Transformers as it does here, round by round."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.types import Round, Source
from tests.decoding.decoded import run, tokens_of
from tests.export.pairs import export_to
from tests.tiny_models import near_copy, tiny_model, tiny_source
from tests.tiny_speech import shallow
from tests.tiny_targets import tiny_tokenizer

K, NEW_TOKENS = 4, 20


@pytest.fixture
def target() -> PreTrainedModel:
    model = tiny_model("whisper", decoder_layers=3)
    model.generation_config.begin_suppress_tokens = None  # Transformers drops it with an assistant
    return model


@pytest.fixture
def accepted(monkeypatch) -> list[int]:
    """How many draft tokens Transformers accepts, a round each."""
    found: list[int] = []
    told = AssistedCandidateGenerator.update_candidate_strategy

    def note(self, input_ids, scores, num_matches) -> None:
        found.append(int(num_matches))
        told(self, input_ids, scores, num_matches)

    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", note)
    return found


def clips(model: PreTrainedModel) -> list[Source]:
    return [tiny_source([number, 3 * number], model) for number in range(6)]


def counted(played: Round) -> int:
    """Accepted tokens as Transformers counts them: without an EOS that ends the draft."""
    return len(played.path) - (len(played.path) == len(played.emitted))


@pytest.mark.parametrize("suppressed", [True, False])
@pytest.mark.parametrize("layers", [2, 3])
def test_transformers_accepts_the_same_tokens_and_encodes_a_clip_once(
    target, accepted, tmp_path, suppressed, layers
):
    if not suppressed:
        target.generation_config.suppress_tokens = None
    target.generation_config.language = "de"  # else its name costs a call of the encoder
    noise = {2: 0.02, 3: 0.0}[layers]  # 3: a copy of the whole decoder, right up to every EOS
    near_copy(shallow(target, layers), noise, seed=1).save_pretrained(tmp_path / "drafter")
    tiny_tokenizer().save_pretrained(tmp_path / "drafter")
    out = export_to(tmp_path / "out", drafter=str(tmp_path / "drafter"), num_assistant_tokens=K)
    drafter = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64)
    outputs = run(target, clips(target), CausalDrafter(CachedModel(drafter)), NEW_TOKENS, k=K)
    calls = []
    target.get_encoder().register_forward_hook(lambda *call: calls.append(call))
    rounds = 0
    for source, output in zip(clips(target), outputs, strict=True):
        accepted.clear()
        [tokens] = target.generate(
            source.inputs["input_features"][None],
            assistant_model=drafter,
            do_sample=False,
            num_beams=1,
            max_new_tokens=NEW_TOKENS,
        ).tolist()
        assert tokens == output.tokens[: len(tokens)]
        assert accepted == [counted(played) for played in output.rounds]
        rounds += len(accepted)
    assert len(calls) == 6  # the target's own, a clip each
    assert rounds < sum(map(len, tokens_of(outputs)))  # drafts were accepted


def test_what_the_target_never_says_is_never_drafted(target):
    never = set(target.generation_config.suppress_tokens)
    drafter = near_copy(shallow(target, 2), 0.02, seed=1)
    for played in run(target, clips(target), CausalDrafter(CachedModel(drafter)), NEW_TOKENS):
        assert not never & {token for one in played.rounds for token in one.drafted}
