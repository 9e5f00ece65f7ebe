"""Compare an exported drafter in Transformers' assisted generation and in drafttrain.

    drafttrain export --drafter checkpoints/whisper-tiny.en-decoder --out my-decoder
    python -m benchmarks.assisted --target WHISPER --drafter my-decoder --data clips.jsonl

    drafttrain export --drafter checkpoints/smollm2-drafter --target SMOLLM2 --out my-drafter
    python -m benchmarks.assisted --target SMOLLM2 --drafter my-drafter --data prompts.jsonl \
        --column prompt --chat --k 2

Transformers loads the folder as the assistant of the target's `generate`; drafttrain uses it as any
language model. Both draft k tokens per round, greedily and without a confidence threshold. A speech
target runs without `begin_suppress_tokens`, which Transformers drops if there is an assistant. The
output tokens and the accepted tokens of each round are compared. If an accepted draft ends with
EOS, Transformers counts one accepted token less: it counts EOS as the token added by the round.
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
    parser.add_argument("--column", help="column of the prompts, if it is not found")
    parser.add_argument("--chat", action="store_true", help="prompts are user messages")
    parser.add_argument("--limit", type=int, help="most inputs")
    parser.add_argument("--k", type=int, default=5, help="draft tokens per round (%(default)s)")
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
    options = {"assistant_model": assistant}
    same_tokens = same_rounds = tokens = our_rounds = their_rounds = 0
    for prompt in tracking(prompts, "inputs", "input"):
        [output] = decode_by(model, method, sampling, [prompt])
        with recorded_rounds() as accepted:
            [generated] = generate_by(pair, sampling, options, [prompt])
        same_tokens += list(generated.tokens) == list(output.tokens)
        same_rounds += accepted == accepted_tokens(output, model.eos_ids)
        tokens += len(output.tokens)
        our_rounds += len(output.rounds)
        their_rounds += len(accepted)
    print(f"{len(prompts)} inputs, {tokens} tokens: tokens equal on {same_tokens}, accepted tokens")
    print(f"of each round on {same_rounds}; rounds {our_rounds} here, {their_rounds} there")
    lengths = tokens / our_rounds, tokens / their_rounds
    print(f"mean acceptance length {lengths[0]:.3f} here, {lengths[1]:.3f} in Transformers")


@contextmanager
def recorded_rounds() -> Iterator[list[int]]:
    """Records the number of accepted tokens of each round of assisted generation."""
    accepted: list[int] = []
    original = AssistedCandidateGenerator.update_candidate_strategy

    def record(self, input_ids, scores, num_matches):
        accepted.append(int(num_matches))
        return original(self, input_ids, scores, num_matches)

    AssistedCandidateGenerator.update_candidate_strategy = record
    try:
        yield accepted
    finally:
        AssistedCandidateGenerator.update_candidate_strategy = original


def accepted_tokens(output: Output, ends: frozenset[int]) -> list[int]:
    """Accepted tokens of each round as Transformers counts them: without a final EOS."""
    return [
        len(played.path) - (len(played.path) > 0 and played.drafted[played.path[-1]] in ends)
        for played in output.rounds
    ]


if __name__ == "__main__":
    main()
