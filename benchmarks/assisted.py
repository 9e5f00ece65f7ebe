"""Does an exported drafter accept in Transformers' assisted generation what it does here?

    drafttrain export --drafter checkpoints/whisper-tiny.en-decoder --out my-decoder
    python -m benchmarks.assisted --target WHISPER --drafter my-decoder --data clips.jsonl

    drafttrain export --drafter checkpoints/smollm2-drafter --target SMOLLM2 --out my-drafter
    python -m benchmarks.assisted --target SMOLLM2 --drafter my-drafter --data prompts.jsonl \
        --column prompt --chat --k 2

The folder is loaded by Transformers alone and given to the target's `generate`; here it drafts as
any language model does. Both draft k tokens a round, greedily, without a confidence threshold, and
of a speech target without `begin_suppress_tokens`, which Transformers drops where there is an
assistant. Compared are the tokens of every output and the accepted tokens of every round. Where an
accepted draft ends with the end of the text, Transformers counts one token less: it is what the
round adds after it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from drafttrain.build.method import Method
from drafttrain.build.pairs import load_pair
from drafttrain.config.decode import SamplingConfig
from drafttrain.config.inputs import DataConfig, TargetConfig
from drafttrain.config.progress import tracking
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Output
from drafttrain.decoding.verifiers import GreedyMatch
from drafttrain.evaluation.prompts import read_prompts
from drafttrain.evaluation.runner import decode_by, generate_by, steady_assistant
from drafttrain.models.speech import takes_audio

from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="folder or Hub name")
    parser.add_argument("--drafter", required=True, help="folder of an exported language model")
    parser.add_argument("--data", required=True, help="clips, texts or prompts")
    parser.add_argument("--column", help="of a prompt, where it is not found by itself")
    parser.add_argument("--chat", action="store_true", help="prompts are a user's turns")
    parser.add_argument("--limit", type=int, help="most inputs")
    parser.add_argument("--k", type=int, default=5, help="tokens of a draft (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    given = parser.parse_args()
    pair = load_pair(TargetConfig(path=given.target), [given.drafter])
    target, model, audio = pair.target, pair.model, takes_audio(pair.target.model.config)
    sampling = SamplingConfig(max_new_tokens=given.max_new_tokens)
    if audio:
        target.model.generation_config.begin_suppress_tokens = None
    data = DataConfig(
        path=given.data, limit=given.limit, input_column=given.column, chat=given.chat
    )
    prompts, _ = read_prompts(pair, load_inputs(data, audio=audio))
    method = Method(pair.drafter, FixedLength(given.k), GreedyMatch())
    assistant = steady_assistant(
        AutoModelForCausalLM.from_pretrained(given.drafter, dtype=target.model.dtype).eval(),
        given.k,
    )
    how = {"assistant_model": assistant}
    same_tokens = same_rounds = tokens = ours = theirs = 0
    for prompt in tracking(prompts, "inputs", "input"):
        [output] = decode_by(model, method, sampling, [prompt])
        with rounds_noted() as noted:
            [found] = generate_by(pair, sampling, how, [prompt])
        same_tokens += list(found.tokens) == list(output.tokens)
        same_rounds += noted == accepted_tokens(output, model.eos_ids)
        tokens += len(output.tokens)
        ours, theirs = ours + len(output.rounds), theirs + len(noted)
    print(f"{len(prompts)} inputs, {tokens} tokens: tokens equal on {same_tokens}, accepted tokens")
    print(f"of every round on {same_rounds}; rounds {ours} here, {theirs} in Transformers")
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


def accepted_tokens(output: Output, ends: frozenset[int]) -> list[int]:
    """Of every round, as Transformers counts them."""
    return [
        len(played.path) - (len(played.path) > 0 and played.drafted[played.path[-1]] in ends)
        for played in output.rounds
    ]


if __name__ == "__main__":
    main()
