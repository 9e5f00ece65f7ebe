"""What is said of one run: real-time factors, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from drafttrain.evaluation.bootstrap import draw_resamples
from drafttrain.evaluation.runner import Decoded
from drafttrain.evaluation.summary import real_time_factors


def test_the_encoder_of_another_program_is_not_taken_for_the_targets():
    context = SimpleNamespace(
        encode_seconds=np.array([1.0, 2.0]),
        clip_seconds=np.array([10.0, 10.0]),
        resamples=draw_resamples(2, 10),
    )
    ours = Decoded("plain", "plain", None, [], np.array([[2.0, 3.0]]))
    found = {name: one.value for name, one in real_time_factors(context, ours).items()}
    assert found == pytest.approx({"rtf": 0.25, "rtf_encoder": 0.15, "rtf_decoder": 0.1})
