"""Settings for synthetic acceptance are as the engines check them."""

import json

from drafttrain.evaluation.served.synthetic import synthetic_rates, synthetic_settings


def test_rates_never_rise_and_stay_between_0_and_1():
    assert synthetic_rates([1.00001, 0.5, 0.50004, 0.50006, -1e-9]) == [1.0, 0.5, 0.5, 0.5, 0.0]


def test_each_engine_gets_exactly_as_many_rates_as_tokens():
    settings = synthetic_settings([0.81234, 0.6, 0.25])
    assert settings["llama.cpp"] == ("--spec-draft-n-max 3 --spec-synth-rates 0.8123,0.6000,0.2500")
    assert json.loads(settings["vllm"]) == {
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.8123, 0.6, 0.25],
    }
