"""Does a Whisper's shallow decoder accept in Transformers' assisted generation what it does here?

    drafttrain export --drafter checkpoints/whisper-tiny.en-decoder --out my-decoder
    python -m benchmarks.assisted_speech --target WHISPER --drafter my-decoder --data clips.jsonl

The folder is loaded by `AutoModelForCausalLM` and given to the target's `generate`; here it drafts
as any language model does. Both draft k tokens a round, greedily, without a confidence threshold,
and without `begin_suppress_tokens`, which Transformers drops where there is an assistant. Compared
are the tokens of every clip and the accepted tokens of every round. Where an accepted draft ends
with the end of the text, Transformers counts one token less: it is what the round adds after it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from drafttrain.build.drafters import make_drafter
from drafttrain.config.inputs import DataConfig, TargetConfig
from drafttrain.config.progress import tracked
from drafttrain.data.inputs.hearing import HeardRows
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Output, Sampling
from drafttrain.decoding.verifiers import GreedyMatch
from drafttrain.models.drafters import load_drafter_beside
from drafttrain.models.loading import load_target


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="folder or Hub name of a Whisper")
    parser.add_argument("--drafter", required=True, help="folder of an exported shallow decoder")
    parser.add_argument("--data", required=True, help="clips")
    parser.add_argument("--limit", type=int, help="most clips")
    parser.add_argument("--k", type=int, default=5, help="tokens of a draft (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    given = parser.parse_args()
    target = load_target(TargetConfig(path=given.target))
    target.model.generation_config.begin_suppress_tokens = None
    rows = load_inputs(DataConfig(path=given.data, limit=given.limit), heard=True)
    sources = HeardRows(target, rows)
    drafter = make_drafter(load_drafter_beside(target, given.drafter), target.model)
    randomness = partial(sequence_randomness, 0)
    parts = FixedLength(given.k), GreedyMatch(), Sampling(), randomness
    decoder = Decoder(CachedModel(target.model), drafter, *parts)
    assistant = AutoModelForCausalLM.from_pretrained(given.drafter).eval()
    assistant.generation_config.update(
        num_assistant_tokens=given.k,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    same_tokens = same_rounds = tokens = ours = theirs = 0
    for place in tracked(range(len(sources)), "clips", "clip"):
        [output] = decoder.decode_all([sources[place]], given.max_new_tokens)
        features = sources[place].inputs["input_features"][None]
        with rounds_noted() as noted, torch.inference_mode():
            [found] = target.model.generate(
                features,
                assistant_model=assistant,
                do_sample=False,
                num_beams=1,
                max_new_tokens=given.max_new_tokens,
            ).tolist()
        ends = target.model.generation_config.eos_token_id
        same_tokens += found == [token for token in output.tokens if token != ends]
        same_rounds += noted == accepted_tokens(output, ends)
        tokens += len(output.tokens)
        ours, theirs = ours + len(output.rounds), theirs + len(noted)
    clips = len(sources)
    print(
        f"{clips} clips, {tokens} tokens: tokens equal on {same_tokens}, accepted tokens of every"
    )
    print(f"round on {same_rounds}; rounds {ours} here, {theirs} in Transformers")
    print(f"mean acceptance length {tokens / ours:.3f} here, {tokens / theirs:.3f} in Transformers")


@contextmanager
def rounds_noted() -> Iterator[list[int]]:
    """The accepted tokens of every round of assisted generation, as it goes."""
    noted: list[int] = []
    original = AssistedCandidateGenerator.update_candidate_strategy

    def note(self, input_ids, scores, num_matches):
        noted.append(int(num_matches))
        return original(self, input_ids, scores, num_matches)

    AssistedCandidateGenerator.update_candidate_strategy = note
    try:
        yield noted
    finally:
        AssistedCandidateGenerator.update_candidate_strategy = original


def accepted_tokens(output: Output, end: int) -> list[int]:
    """Of every round, as Transformers counts them."""
    return [
        len(played.path) - (len(played.path) > 0 and played.drafted[played.path[-1]] == end)
        for played in output.rounds
    ]


if __name__ == "__main__":
    main()
