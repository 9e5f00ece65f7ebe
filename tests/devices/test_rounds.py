"""Rounds on a simulated GPU: no operation mixes devices, and synchronisations are few."""

import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch

from drafttrain.decoding import loop
from drafttrain.decoding.batching import to_host
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.engine import Engine
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import zero_after_eos
from drafttrain.decoding.roles import StopPolicy, Verifier
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.stopping import Entropy, FixedLength
from drafttrain.decoding.types import Proposal, Sampling
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling, SpecVerification
from tests.decoding import methods
from tests.decoding.decoded import decoder_of, drawn
from tests.devices.pretended import DEVICE, moved, pretended_gpu
from tests.tiny_drafters import block_heads, shared, tiny_drafter

K, ROUNDS, BATCH = 3, 3, 2
SAMPLED = Sampling(temperature=0.6, top_k=20)
NAMES = ["plain", "causal", "copies", "heads", "cascade", "opt-tree", "rsd-c", "rsd-s", "several"]
NAMES += ["anchored", "paper", "bidirectional", "target's encoder", "rsd-s over slots"]
WAITS = {
    "plain": 1,
    "copies": 1,
    "heads": 1,
    "causal": K + 1,
    "anchored": 1,
    "paper": 1,
    "bidirectional": 1,
}
"""Device synchronisations of a greedy round of a batch: one per call whose tokens the next call
needs, and one for the verdict."""


def waits_of_rounds(
    name: str, sampling: Sampling, verifier: Verifier | None = None, stop: StopPolicy | None = None
) -> list[int]:
    """Returns the number of device synchronisations of each round of a batch after the first."""
    with pretended_gpu() as waits:
        decoder, sources = on_the_gpu(name, sampling, verifier, stop or FixedLength(K))
        rounds, counts = decoder.decode(sources, 60, BATCH), []
        for _ in range(ROUNDS):
            before = waits.count
            for _ in sources:
                next(rounds)
            counts.append(waits.count - before)
        rounds.close()
    return counts[1:]


def on_the_gpu(name: str, sampling: Sampling, verifier: Verifier | None, stop: StopPolicy):
    target = moved(shared("marian"))
    target.generation_config.eos_token_id = None
    with (
        mock.patch.object(methods, "drafter_of", lambda _, **given: moved(tiny_drafter(**given))),
        mock.patch.object(methods, "block_heads", lambda **given: moved(block_heads(**given))),
    ):
        drafter = methods.METHODS[name](target, lambda *_: moved(shared("marian")))
    alone = SampledRandomness(None)  # the device has no generator
    decoder = decoder_of(target, drafter, stop, verifier, sampling, lambda _: alone)
    return decoder, [make_source([5, 9, 7], target), make_source([8, 6], target)]


def test_the_simulated_device_reports_as_a_real_one():
    with pretended_gpu() as waits:
        there = torch.zeros(3, device=DEVICE)
        with pytest.raises(RuntimeError, match="device"):
            there + torch.zeros(3)
        assert (there + there).tolist() == [0.0] * 3
        assert int(there[0]) == 0 and there.cpu().device.type == "cpu"
        assert waits.count == 3
        assert (torch.ones(2) + 1).tolist() == [2.0, 2.0]  # CPU tensors have values
        assert waits.count == 3


def test_values_of_a_device_and_the_host_return_in_their_order():
    class Away(torch.Tensor):
        device = torch.device(DEVICE)

    one, other = (torch.tensor(values).as_subclass(Away) for values in ([3, 1], [4]))
    assert to_host([one, torch.tensor([7, 8, 9]), other]) == [[3, 1], [7, 8, 9], [4]]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "several"])
def test_a_greedy_round_runs_on_one_device_and_waits_for_it_seldom(name):
    found = waits_of_rounds(name, Sampling())
    if name in WAITS:
        assert found == [WAITS[name]] * len(found)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WAITS or name == "causal"])
def test_a_sampled_round_runs_on_one_device(name):
    waits_of_rounds(name, SAMPLED)


@pytest.mark.parametrize("name", ["causal", "anchored"])
def test_stop_policies_and_lossy_rules_run_on_one_device(name):
    waits_of_rounds(name, Sampling(), SpecVerification(3, 1.0), Entropy(2.0, K))


def fetched(proposal: Proposal) -> Proposal:
    tokens = proposal.tokens.clone()
    tokens.is_known = True
    return replace(proposal, tokens=tokens)


@pytest.mark.parametrize(
    ("name", "verifier"),
    [
        ("heads", GreedyMatch()),
        ("anchored", GreedyMatch()),
        ("paper", GreedyMatch()),
        ("paper", SpecVerification(3, 1.0)),
        ("anchored", RejectionSampling()),
    ],
)
def test_drafts_that_the_host_does_not_know_are_verified_alike(name, verifier):
    """Rounds on the CPU with the device's code are equal, including EOS within drafts."""
    target = shared("marian")
    sources = [make_source([5, 9, 7, token], target) for token in (3, 8, 6, 11, 20)]

    def play(ends: int | list[int]) -> list[tuple]:
        config = copy.deepcopy(target.generation_config)
        config.eos_token_id = ends
        cached = CachedModel(target).under(config)
        drafter = methods.METHODS[name](target, methods.near)
        decoder = decoder_of(cached, drafter, K, verifier, randomness=drawn)
        whole = Engine.forward_batch
        with mock.patch.object(Engine, "forward_batch", autospec=True, side_effect=whole) as call:
            found = [
                (one.sequence, one.drafted, one.path, one.emitted)
                for one in decoder.decode(sources, 12, BATCH)
            ]
        sizes = [request.size for given in call.call_args_list for request in given.args[1]]
        return [*found, sizes]

    unending = play(-1)
    drafted = [token for _, tokens, *_ in unending[:-1] for token in tokens[:-1]]
    ends = sorted({*drafted[::3]})  # many drafts have one before other tokens
    known = play(ends)
    cut = [tokens for _, tokens, *_ in known[:-1] if len(tokens) < K]
    assert any(tokens[-1:] == [end] for tokens in cut for end in ends)
    away = property(lambda one: one.is_chain and not getattr(one.tokens, "is_known", False))
    with (
        mock.patch.object(Proposal, "is_on_device", away),
        mock.patch.object(loop, "on_host", lambda proposals: list(map(fetched, proposals))),
    ):
        assert play(-1) == unending  # cached tokens are not computed again
        assert play(ends)[:-1] == known[:-1]
        rows = torch.full((K + 1, 4), torch.nan)
        ended = zero_after_eos(rows, Proposal.chain(torch.tensor([3, 1, 2])), frozenset({1}))
    assert ended[2].eq(0.0).all() and ended[[0, 1, 3]].isnan().all()
