"""Settings that make an engine accept as often as was measured, whatever the drafter says.

llama.cpp and vLLM have a mode for planning: drafts are made and verified as ever, and a coin of the
given rates decides. What a server then shows is its throughput with such a drafter. Outputs are of
no use.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

DIGITS = 4


def synthetic_rates(rates: Sequence[float]) -> list[float]:
    """Unconditional acceptance by position as engines take it: in [0, 1], never rising."""
    shown, highest = [], 1.0
    for rate in rates:
        highest = min(highest, max(0.0, round(rate, DIGITS)))
        shown.append(highest)
    return shown


def synthetic_settings(rates: Sequence[float]) -> dict[str, str]:
    """By engine: options of llama-server; fields of vLLM's --speculative-config."""
    shown = synthetic_rates(rates)
    listed = ",".join(f"{rate:.{DIGITS}f}" for rate in shown)
    fields = {
        "num_speculative_tokens": len(shown),
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": shown,
    }
    return {
        "llama.cpp": f"--spec-draft-n-max {len(shown)} --spec-synth-rates {listed}",
        "vllm": json.dumps(fields, separators=(",", ":")),
    }
